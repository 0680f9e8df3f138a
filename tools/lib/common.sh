# Shared by the scripts in tools/: messages for people, running as root, asking apt. Sourced, never run.
# shellcheck shell=bash

# Progress goes to standard error, so that a script's standard output stays usable by other programs.
say() { printf '%s\n' "$*" >&2; }

warn() { printf 'warning: %s\n' "$*" >&2; }

# What happened and the value seen; further arguments are lines that say what to do next.
die() {
  printf 'error: %s\n' "$1" >&2
  shift
  local line
  for line in "$@"; do printf '  %s\n' "$line" >&2; done
  exit 1
}

usage_error() {
  printf 'error: %s\nTry "%s --help".\n' "$1" "${0##*/}" >&2
  exit 2
}

is_root() { [ "$(id -u)" -eq 0 ]; }

# Whether as_root can work: we are root, or there is a sudo that can ask for, or does not need, a password.
can_be_root() {
  is_root && return 0
  command -v sudo >/dev/null || return 1
  [ -t 0 ] || sudo -n true 2>/dev/null
}

as_root() {
  if is_root; then "$@"; else sudo -- "$@"; fi
}

# Runs apt-get as root without questions. Waits for another apt to finish instead of failing.
apt_get() {
  as_root env DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 apt-get -o DPkg::Lock::Timeout=300 \
    -o APT::Update::Error-Mode=any -o Acquire::Retries=2 "$@"
}

# The version apt would install of a package, or nothing.
apt_candidate() {
  LC_ALL=C apt-cache policy "$1" 2>/dev/null | sed -n 's/^ *Candidate: //p' | grep -v '^(none)$' || true
}

# Debian mirrors that this machine's apt already uses, read by apt itself, whatever the files' format.
debian_mirrors() {
  local suites='(oldoldstable|oldstable|stable|testing|unstable|sid|buster|bullseye|bookworm|trixie|forky|duke)'
  LC_ALL=C apt-get indextargets --format "\$(REPO_URI) \$(RELEASE)" 'Created-By: Packages' 2>/dev/null |
    sed -nE "s#^([^ ]+) $suites(-updates|-backports)?\$#\1#p" | grep -v '^cdrom:' | awk '!seen[$0]++' || true
}

# In a subshell, before a program that is to be dumped: closes what it would inherit beyond the standard
# streams. What a terminal, an editor or a CI runner left open is nothing CRIU could restore.
close_inherited_fds() {
  local fd
  for fd in /proc/self/fd/*; do
    fd=${fd##*/}
    [ "$fd" -le 2 ] || eval "exec $fd>&-"
  done 2>/dev/null
}

# One field of os-release, such as ID or VERSION_CODENAME.
os_field() {
  local file=/etc/os-release
  [ -r "$file" ] || return 0
  sed -n "s/^$1=//p" "$file" | tr -d \"\' | head -n 1
}

# ---- For the scripts that build ---------------------------------------------------------------------

readonly kMinimumGcc=12

# The major version of a g++, or 0.
gcc_major() {
  local version
  version=$("$1" -dumpversion 2>/dev/null) || version=0
  printf '%s\n' "${version%%.*}"
}

# Sets CXX to a compiler that is new enough, unless the user chose one, and CC to its C, for the tests. Ubuntu 22.04's
# g++ is 11, and its g++-12 comes with no program of the name cc.
choose_compiler() {
  [ -z "${CXX:-}" ] || return 0
  local candidate
  for candidate in g++ g++-12 g++-13 g++-14; do
    if [ "$(gcc_major "$candidate")" -ge $kMinimumGcc ]; then
      export CXX=$candidate CC=${CC:-${candidate/g++/gcc}}
      return 0
    fi
  done
  return 1
}

# Runs a command, quietly if it succeeds: what it said goes to a log file, which is shown if it fails.
# quietly LOG WHAT COMMAND...
quietly() {
  local log=$1 what=$2
  shift 2
  if "$@" >"$log" 2>&1 </dev/null; then return 0; fi
  tail -n 40 "$log" >&2
  printf 'error: %s failed; the whole output is in %s.\n' "$what" "$log" >&2
  return 1
}

# say_if_frozen LOG: what apt means by a Release file that is expired.
say_if_frozen() {
  if grep -qE 'Release file for .* is (expired|not valid yet)' "$1"; then
    say "That mirror is a copy of an earlier day (frozen), or the clock here is wrong: its lists are signed, but"
    say "their date is over. Name a mirror that is kept up to date; or, if it is frozen on purpose, tell apt so:"
    say "  echo 'Acquire::Check-Valid-Until \"false\";' >/etc/apt/apt.conf.d/99frozen-mirror"
  fi
}

# Seconds with tenths since a moment taken with now().
now() { date +%s%N; }
since() {
  local tenths=$((($(date +%s%N) - $1) / 100000000))
  printf '%d.%d s' $((tenths / 10)) $((tenths % 10))
}
