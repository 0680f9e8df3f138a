# Proves the layering: reads include lines, "FILE:LINE:TEXT", and prints each that points the wrong way.
# The variable "list" names a file with all paths of the tree; they are all relative to its top.
#
#   base <- proc <- driver, attach <- checkpoint; base <- image; checkpoint, image <- direct; driver, image <- criu;
#   checkpoint, direct, criu <- doctor <- operations <- report <- job <- cli, capi; base <- group <- rendezvous <- cli;
#   group <- direct
#   report <- compat; direct, criu <- plugins, but not image: what runs inside CRIU knows CRIU's files and not ours
#   include/stasis <- python; include/abi <- all other C++: what the driver's interface is, and what programs of ours
#   that run in different processes agree on

BEGIN {
  while ((getline path < list) > 0) exists[path] = 1
  allow("include", "")
  allow("abi", "")
  allow("base", "")
  allow("group", "base")
  allow("proc", "base")
  allow("attach", "base proc")
  allow("driver", "base proc")
  allow("image", "base")
  allow("criu", "base proc driver image")
  allow("checkpoint", "base proc attach driver")
  middle = "base group proc attach driver image"
  allow("direct", middle " checkpoint")
  middle = middle " checkpoint direct criu"
  allow("doctor", middle)
  middle = middle " doctor"
  allow("operations", middle)
  allow("report", middle " operations")
  library = middle " operations report"
  allow("job", library)
  allow("rendezvous", "base group")
  allow("cli", library " job rendezvous")
  allow("compat", library)
  # It runs inside CRIU: the core only, and CRIU's own files, without what these stand on besides (image).
  allow("plugins", "base group proc attach driver checkpoint direct criu")
  allow("capi", library " job")
  # By the C interface only, so that it can be compiled against a library that another has built.
  allow("python", "")
  # These run inside other programs, or stand in for the driver: nothing of the library may get into them.
  allow("sim", "")
  allow("preload", "")
  # Programs of a user's kind; they borrow the owners of descriptors, and know how kernels look to sim/.
  allow("examples", "base sim")
  allow("workloads", "base sim examples")
  # Tests and benchmarks may look anywhere.
  allow("tests", library " rendezvous job cli capi compat plugins sim preload workloads examples")
  allow("bench", library " sim workloads tests examples")
}

# Every part may include itself, include/abi and the public headers.
function allow(part, others,    n, names, i) {
  known[part] = 1
  allowed[part, part] = 1
  if (part != "include" && part != "python") allowed[part, "abi"] = 1
  if (part != "abi" && part != "sim" && part != "preload" && part != "workloads") allowed[part, "include"] = 1
  n = split(others, names, " ")
  for (i = 1; i <= n; i++) allowed[part, names[i]] = 1
}

function part_of(path,    p) {
  split(path, p, "/")
  if (p[1] == "src") return p[3] == "" ? "" : p[2]
  if (p[1] == "tests" && p[2] == "workloads") return "workloads"
  if (p[1] == "include" && p[2] == "abi") return "abi"
  return p[1]
}

# A test beside the code may use what the code may, and the helpers in tests/.
function is_test(path) { return path ~ /_(unittest|integrationtest|fuzzer|benchmark)\.cc$/ }

# Without "." and "x/.." components.
function normal(path,    n, p, i, out, depth) {
  n = split(path, p, "/")
  depth = 0
  for (i = 1; i <= n; i++) {
    if (p[i] == "" || p[i] == ".") continue
    if (p[i] == ".." && depth > 0) depth--
    else out[++depth] = p[i]
  }
  path = out[1]
  for (i = 2; i <= depth; i++) path = path "/" out[i]
  return path
}

# The file of ours that an include means, or "": the compiler looks in these folders, in this order.
function resolve(file, name,    here) {
  here = file
  sub(/[^\/]*$/, "", here)
  if (normal(here name) in exists) return normal(here name)
  if (normal("src/" name) in exists) return normal("src/" name)
  if (normal("include/" name) in exists) return normal("include/" name)
  if (normal(name) in exists) return normal(name)
  return ""
}

{
  file = $0
  sub(/:.*/, "", file)
  line = substr($0, length(file) + 2)
  sub(/:.*/, "", line)
  name = $0
  sub(/^[^"<]*["<]/, "", name)
  sub(/[">].*/, "", name)
  target = resolve(file, name)
  from = part_of(file)
  if (target == "" || from == "") next
  to = part_of(target)
  if (!(from in known)) {
    if (!(from in reported)) printf "%s: \"%s\" is no known part; give it a place in tools/lib/layers.awk\n", file, from
    reported[from] = 1
    next
  }
  if ((from, to) in allowed) next
  if (is_test(file) && (to == "tests" || to == "workloads" || to == "sim")) next
  printf "%s:%s: %s may not include %s (%s)\n", file, line, from, to, target
}
