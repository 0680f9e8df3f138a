# Programs with obstacles, and what stasis doctor says of them. A file of tests loads helpers, stasis_lib and this, and has
#   setup() { setup_doctor; }
#   teardown() { end_doctor; }

setup_doctor() {
  setup_stasis
  need_root "CRIU"
}

end_doctor() {
  end_stasis
  # CRIU leaves the second where it was asked by itself; others' are not for us to remove.
  [[ -z $(compgen -G "$BATS_TEST_TMPDIR/criu-*") ]] || rm -f /dev/shm/sem.stasis-doctor-* /dev/shm/link_remap.*
  [[ ! -e $BATS_TEST_TMPDIR/cgroup ]] || wait_until 60 find "$(<"$BATS_TEST_TMPDIR/cgroup")" -depth -type d -delete
  [[ ! -s $BATS_TEST_TMPDIR/ping-range ]] || cat "$BATS_TEST_TMPDIR/ping-range" >/proc/sys/net/ipv4/ping_group_range
  [[ ! -e $BATS_TEST_TMPDIR/huge-pages ]] || cat "$BATS_TEST_TMPDIR/huge-pages" >/proc/sys/vm/nr_hugepages
}

# lights ID: of the findings about the processes that have this id, in a line.
lights() { json "' '.join(f['light'] for f in d['processes'] if f['id'] == '$1')"; }

# undumpable ID TEXT: the doctor is red, dump refuses before it touches anything, CRIU would too.
undumpable() {
  capture stasis doctor "$TARGET" --no-trial --json
  ((status == 1))
  assert_equal "$(json '[d["ok"], d["light"]]')" "[False, 'red']"
  assert_equal "$(lights "$1")" red "$1"
  assert_contains "$out" "$2"
  # The driver can suspend it all the same.
  assert_equal "$(json '[d["verdict"][verb]["possible"] for verb in ("suspend", "dump", "restore")]')" "[True, False, True]"
  assert_contains "$(json 'd["verdict"]["dump"]["because"]')" "'$1'"
  STASIS_SIM_FAULTS="lock:error=999" refused 9 undumpable dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "$2"
  refused 9 criu-failed dump "$TARGET" --images-dir "$image" --ignore-undumpable
  unharmed
}

unharmed() {
  target_goes_on
  no_image
  nothing_left
}

# start_cases PYTHON: what start_with starts, with a child for each function case_NAME of PYTHON, which is
# called NAME, has a session of its own and has done what its function says. One that raises is left
# out. Their numbers are those of the files "pid-NAME".
start_cases() {
  start_with "libc.mmap.restype = ctypes.c_void_p
libc.syscall.restype = ctypes.c_long
def other(act):  # a child that does this, and stays
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        act(); os.write(w, b'x'); time.sleep(300)
    os.read(r, 1); os.close(r); os.close(w)
    return pid
def unshare(flags):
    if libc.unshare(flags) != 0: raise OSError(ctypes.get_errno(), 'unshare')
def mapped(size, flags, fd):
    at = libc.mmap(None, ctypes.c_size_t(size), 3, flags, fd, ctypes.c_long(0))
    if at in (None, 2**64 - 1): raise OSError(ctypes.get_errno(), 'mmap')
    return at
def mount(name, kind):
    path = os.path.join(folder, name); os.mkdir(path)
    print(path, file=open(folder + '/mounts', 'a'), flush=True)
    if libc.mount(b't', path.encode(), kind, 0, None) != 0: raise OSError(ctypes.get_errno(), 'mount')
    return path
keep = []
$1
for name, act in [(key[5:], value) for key, value in list(globals().items()) if key.startswith('case_')]:
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(r); os.setsid(); libc.prctl(15, name.encode(), 0, 0, 0)
        try: keep.append(act())
        except OSError as e: os.write(w, str(e).encode()); os._exit(0)
        os.write(w, b'done'); os.close(w); time.sleep(300)
    os.close(w)
    said = os.read(r, 200).decode(); os.close(r)
    if said != 'done': print('not here:', name, said, flush=True)
    else: print(pid, file=open(folder + '/pid-' + name, 'w'))"
}

# light_of NAME ID: the worst of the findings about a process of that name.
light_of() {
  json "max(['', *{f['light'] for f in d['processes'] if f['id'] == '$2' and '($1)' in f['what']}], key=['', 'green', 'yellow', 'red'].index)"
}

# criu_dumps NAME [ARGUMENT...]: plain CRIU does it, with that child alone.
criu_dumps() {
  local images=$BATS_TEST_TMPDIR/criu-$1 pid
  pid=$(<"$BATS_TEST_TMPDIR/pid-$1")
  shift
  rm -rf "$images"
  mkdir "$images"
  "$(real_criu)" dump --no-default-config -t "$pid" -D "$images" -o log --leave-running --manage-cgroups=ignore \
    --network-lock skip --ghost-limit 256M "$@" >/dev/null 2>&1 3>&-
}

# each_is_red: of lines NAME|ID|WORDS: the doctor says so, and CRIU fails with these words.
each_is_red() {
  local name id words
  while IFS='|' read -r name id words; do
    if [[ ! -e $BATS_TEST_TMPDIR/pid-$name ]]; then
      grep "not here: $name" "$TARGET_LOG" | sed 's/^/# /' >&3
      continue
    fi
    assert_equal "$(light_of "$name" "$id")" red "$name"
    if criu_dumps "$name" --link-remap; then
      echo "CRIU dumps $name" >&2
      return 1
    fi
    grep -q "$words" "$BATS_TEST_TMPDIR/criu-$name/log" || {
      grep Error "$BATS_TEST_TMPDIR/criu-$name/log" >&2
      return 1
    }
  done
}
