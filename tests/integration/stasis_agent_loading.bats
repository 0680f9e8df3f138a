#!/usr/bin/env bats
# How programs and their libraries find the functions that the agent hooks.
# Long because each way to load the driver is a program of its own, whose source stands in its test.

load helpers
load stasis_lib
load agent_target_lib

@test "who else stands in for mmap is asked as before" {
  cat >"$BATS_TEST_TMPDIR/other.c" <<'END'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <sys/mman.h>
static int count;
void* mmap(void* at, size_t bytes, int how, int flags, int fd, off_t offset) {
  void* (*next)(void*, size_t, int, int, int, off_t) = dlsym(RTLD_NEXT, "mmap");
  ++count;
  return next(at, bytes, how, flags, fd, offset);
}
__attribute__((destructor)) static void say(void) { fprintf(stderr, "seen %d\n", count); }
END
  cat >"$BATS_TEST_TMPDIR/program.c" <<'END'
#include <sys/mman.h>
int main(void) {
  for (int i = 0; i < 7; ++i)
    if (mmap(0, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | (i ? 0 : MAP_POPULATE), -1, 0) == MAP_FAILED) return 1;
  return 0;
}
END
  cc -shared -fPIC "$BATS_TEST_TMPDIR/other.c" -o "$BATS_TEST_TMPDIR/other.so" -ldl
  cc "$BATS_TEST_TMPDIR/program.c" -o "$BATS_TEST_TMPDIR/program"
  local order seen
  for order in "$agent:$BATS_TEST_TMPDIR/other.so" "$BATS_TEST_TMPDIR/other.so:$agent"; do
    seen=$(LD_PRELOAD=$order "$BATS_TEST_TMPDIR/program" 2>&1)
    ((${seen#seen } >= 7)) || { echo "$order: $seen" >&2; return 1; }
  done
}

# As an extension module of Python, with its dependencies.
@test "a library that was loaded for itself alone finds its own functions, and the driver's" {
  local dir=$BATS_TEST_TMPDIR
  echo 'int of_dependency(void) { return 7; }' >"$dir/dependency.c"
  cat >"$dir/module.c" <<'END'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
int of_module(void) { return 42; }
static int call(const char* name) {
  int (*function)(void) = dlsym(RTLD_DEFAULT, name);
  return function ? function() : -1;
}
void look(void* alone) {
  printf("%d %d %d\n", call("of_module"), call("of_dependency"), dlsym(RTLD_DEFAULT, "cuNoSuchCall") == 0);
  printf("%d\n", dlsym(RTLD_DEFAULT, "cuDeviceGet") == dlsym(alone, "cuDeviceGet"));
  printf("%d\n", dlsym(RTLD_DEFAULT, "cuMemAlloc_v2") == dlsym(alone, "cuMemAlloc_v2"));
}
END
  cat >"$dir/program.c" <<'END'
#include <dlfcn.h>
#include <stdio.h>
int main(int count, char** names) {
  void* module = dlopen(names[1], RTLD_NOW | RTLD_LOCAL);
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!module || !driver) return puts(dlerror()), 1;
  ((void (*)(void*))dlsym(module, "look"))(driver);
  return count != 2;
}
END
  cc -shared -fPIC "$dir/dependency.c" -o "$dir/libdependency.so"
  cc -shared -fPIC "$dir/module.c" -o "$dir/module.so" -Wl,--no-as-needed -L"$dir" -ldependency \
    -Wl,-rpath,"$dir" "$STASIS_LIBCUDA"
  cc "$dir/program.c" -o "$dir/program" -ldl
  local preload
  for preload in "" "$agent"; do
    capture env LD_LIBRARY_PATH="${STASIS_LIBCUDA%/*}" LD_PRELOAD="$preload" "$dir/program" "$dir/module.so"
    assert_equal "$out" $'42 7 1\n1\n1\n' "with '$preload'"
  done
}

# One that was linked with the program, or with a library of that, and which the program has not opened by itself.
@test "a library that came as another's dependency may ask for the driver's functions" {
  local dir=$BATS_TEST_TMPDIR
  cat >"$dir/asks.c" <<'END'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
static void ask(const char* name) {
  void* function = dlsym(RTLD_DEFAULT, name);
  printf("%s: %s, %s\n", name, function ? "found" : "none", dlerror() ? "and why" : "no error");
}
void look(void) {
  ask("cuInit");
  ask("cuNoSuchCall");
}
END
  echo 'void look(void); void start(void) { look(); }' >"$dir/module.c"
  echo 'void look(void); int main(void) { look(); }' >"$dir/linked.c"
  cat >"$dir/opens.c" <<'END'
#include <dlfcn.h>
#include <stdio.h>
int main(int count, char** names) {
  void* module = dlopen(names[count - 1], RTLD_NOW | RTLD_LOCAL);
  if (!module) return puts(dlerror()), 1;
  ((void (*)(void))dlsym(module, "start"))();
}
END
  local where=(-L"$dir" -Wl,-rpath,"$dir")
  cc -shared -fPIC "$dir/asks.c" -o "$dir/libasks.so"
  cc -shared -fPIC "$dir/asks.c" -o "$dir/libknows.so" -Wl,--no-as-needed "$STASIS_LIBCUDA"
  cc "$dir/linked.c" -o "$dir/linked" "${where[@]}" -lasks
  cc "$dir/opens.c" -o "$dir/opens" -ldl
  local preload name finds
  for preload in "" "$agent"; do
    capture env LD_PRELOAD="$preload" "$dir/linked"
    assert_equal "$status/$out" $'0/cuInit: none, and why\ncuNoSuchCall: none, and why\n' "with '$preload'"
    for name in asks knows; do
      [[ $name == knows ]] && finds="found, no error" || finds="none, and why"
      cc -shared -fPIC "$dir/module.c" -o "$dir/$name.so" "${where[@]}" -l"$name"
      capture env LD_LIBRARY_PATH="${STASIS_LIBCUDA%/*}" LD_PRELOAD="$preload" "$dir/opens" "$dir/$name.so"
      assert_equal "$status/$out" "0/cuInit: $finds"$'\ncuNoSuchCall: none, and why\n' "with '$preload'"
    done
  done
}

# As Julia opens all libraries, and others their plugins: such a one finds the C library's dlsym.
@test "GPU memory that a library uses past the agent goes by the driver" {
  local dir=$BATS_TEST_TMPDIR
  cat >"$dir/plugin.c" <<'END'
#include <dlfcn.h>
extern int (*is_right)(unsigned long long);
static int (*copy)(void*, unsigned long long, unsigned long);
int copies_right(unsigned long long memory) {
  unsigned char byte = 0;
  if (!copy) copy = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuMemcpyDtoH_v2");
  return copy(&byte, memory, 1) == 0 && byte == 7;
}
__attribute__((constructor)) static void loaded(void) { is_right = copies_right; }
END
  echo '#include <dlfcn.h>
void* elsewhere(void) { return dlsym(RTLD_DEFAULT, "puts"); }
void* open_within(const char* name, int mode) { return dlopen(name, mode); }' >"$dir/harmless.c"
  cat >"$dir/program.c" <<'END'
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#define CALL(name, ...) (((int (*)())dlsym(driver, name))(__VA_ARGS__))
int (*is_right)(unsigned long long);
int main(int count, char** names) {  // STATUS PLUGIN HARMLESS ANOTHER
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_DEEPBIND);
  int mode = RTLD_NOW | (strstr(names[2], "deep") ? RTLD_DEEPBIND : 0);
  if (strstr(names[2], "again")) {  // at last where another one lay when it was opened first
    struct link_map* other = dlopen(names[4], RTLD_NOW);
    ElfW(Addr) there = other->l_addr;
    void* first = dlopen(names[2], mode);
    dlclose(first);
    dlclose(other);
    struct link_map* last = dlopen(names[2], mode);
    if (last->l_addr != there) return 5;
  }
  void* harmless = dlopen(names[3], RTLD_NOW | RTLD_DEEPBIND);
  void* (*open)(const char*, int) = dlsym(harmless, "open_within");
  if (!strstr(names[2], "within")) open = dlopen;
  if (!open(names[2], mode)) return 2;
  unsigned long long memory = 0;
  void* context = 0;
  if (!is_right || CALL("cuInit", 0) || CALL("cuCtxCreate_v2", &context, 0, 0) ||
      CALL("cuMemAlloc_v2", &memory, 16UL << 20) || CALL("cuMemsetD8_v2", memory, 7, 16UL << 20))
    return 3;
  for (unsigned n = 1;; ++n) {
    if (!is_right(memory)) return 4;
    FILE* file = fopen(names[1], "w");
    fprintf(file, "round %012u ok\n", n);
    fclose(file);
    usleep(200);
  }
}
END
  cc -D_GNU_SOURCE -shared -fPIC "$dir/plugin.c" -o "$dir/plugin.so" -ldl
  cp "$dir/plugin.so" "$dir/deep.so"
  cp "$dir/plugin.so" "$dir/deep-again.so"
  cp "$dir/plugin.so" "$dir/deep-within.so"
  # One that exports nothing.
  cc -D_GNU_SOURCE -fvisibility=hidden -shared -fPIC "$dir/plugin.c" -o "$dir/deep-hidden.so" -ldl
  cc -D_GNU_SOURCE -shared -fPIC "$dir/harmless.c" -o "$dir/harmless.so" -ldl
  cc -D_GNU_SOURCE -w -rdynamic "$dir/program.c" -o "$dir/program" -ldl
  TARGET_STATUS=$dir/status
  local plugin path
  for plugin in plugin deep-hidden deep-again deep-within deep; do
    [[ $plugin == plugin ]] || kill -KILL "$TARGET"
    path=direct
    [[ $plugin == plugin ]] || path=driver
    rm -f "$TARGET_STATUS"
    (LD_PRELOAD=$agent exec_on_gpu setsid "$dir/program" "$TARGET_STATUS" "$dir/$plugin.so" "$dir/harmless.so" \
      "$dir/plugin.so") </dev/null >"$dir/log" 2>&1 3>&- &
    TARGET=$!
    echo "$TARGET" >>"$targets"
    wait_until 60 target_is_up
    for _ in 1 2; do cycle_by "$path"; done
  done
  done_by suspend "$TARGET"
  assert_contains "$err" "past the agent: $dir/deep.so"
  done_by resume "$TARGET"
  refused 8 not-supported suspend "$TARGET" --path direct
  target_goes_on
}

@test "a library that may call past the agent is not opened while the program is held back" {
  local go=$BATS_TEST_TMPDIR/go holder
  start_doing open-deep "$go"
  timeout 60 python3 -IS "$BATS_TEST_DIRNAME/agent_page.py" "$TARGET" export "$go" 3>&- &
  holder=$!
  wait_until 60 test -e "$go.asked"
  sleep 0.3
  [[ ! -e $go.opened ]]
  rm "$go"
  wait "$holder"
  wait_until 60 test -e "$go.opened"
  target_goes_on
  cycle_by direct
  target_verifies
}

# start_program DIR: TARGET is DIR/program, with the agent in it.
start_program() {
  TARGET_STATUS=$1/status
  (LD_PRELOAD=$agent exec_on_gpu setsid "$1/program" "$TARGET_STATUS") </dev/null >"$1/log" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
}

# As .NET does for what is imported from libdl, and other languages without a linker.
@test "dlsym that a program looks up in the C library comes to the agent as well" {
  local dir=$BATS_TEST_TMPDIR
  cat >"$dir/program.c" <<'END'
#include <dlfcn.h>
#include <stdio.h>
#include <unistd.h>
#define CALL(name, ...) (((int (*)())find(driver, name))(__VA_ARGS__))
int main(int count, char** names) {
  void* (*find)(void*, const char*) = dlsym(dlopen("libc.so.6", RTLD_NOW), "dlsym");
  void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  unsigned long long memory = 0;
  void* context = 0;
  if (CALL("cuInit", 0) || CALL("cuCtxCreate_v2", &context, 0, 0) ||
      CALL("cuMemAlloc_v2", &memory, 16UL << 20) || CALL("cuMemsetD8_v2", memory, 7, 16UL << 20))
    return 3;
  for (unsigned n = 1;; ++n) {
    unsigned char byte = 0;
    if (CALL("cuMemcpyDtoH_v2", &byte, memory, 1UL) || byte != 7) return 4;
    FILE* file = fopen(names[1], "w");
    fprintf(file, "round %012u ok\n", n);
    fclose(file);
    usleep(200);
  }
}
END
  cc -D_GNU_SOURCE -w "$dir/program.c" -o "$dir/program" -ldl
  start_program "$dir"
  cycle_by direct
  cycle_by direct
}

# It does not look up the calls: the loader has bound them.
@test "a program that is linked with the driver is suspended by the direct path" {
  TARGET_LOG=$BATS_TEST_TMPDIR/target.log
  TARGET_STATUS=$BATS_TEST_TMPDIR/target.status
  (LD_PRELOAD=$agent exec_on_gpu setsid stasis-agent-linked "$TARGET_STATUS") </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
  cycle_by direct
  cycle_by direct
  target_verifies
}

# As CUDA's lib64/stubs/libcuda.so, which programs open to see whether there is a driver.
@test "a program may look into the toolkit's stub of the driver before it uses the driver" {
  local dir=$BATS_TEST_TMPDIR name preload
  mkdir "$dir/stubs"
  for name in cuDriverGetVersion cuInit cuGetProcAddress_v2 cuCtxCreate_v2 cuMemAlloc_v2 cuMemsetD8_v2 cuMemcpyDtoH_v2; do
    echo "int $name() { return 34; }"
  done >"$dir/stub.c"
  cat >"$dir/program.c" <<'END'
#include <dlfcn.h>
#include <stdio.h>
int cuInit(unsigned flags);
int cuCtxCreate_v2(void** context, unsigned flags, int device);
int cuMemAlloc_v2(unsigned long long* memory, unsigned long size);
int cuMemsetD8_v2(unsigned long long memory, unsigned char byte, unsigned long size);
int main(int count, char** names) {
  void *stub = dlopen(names[1], RTLD_NOW | RTLD_LOCAL), *driver, *context;
  unsigned long long memory = 0;
  unsigned char byte = 0;
  if (!stub) return puts(dlerror()), 1;
  setvbuf(stdout, 0, _IONBF, 0);
  printf("%d\n", ((int (*)(unsigned))dlsym(stub, "cuInit"))(0));
  printf("%d\n", dlsym(stub, "cuNoSuchCall") == 0 && dlerror());
  if (cuInit(0) || cuCtxCreate_v2(&context, 0, 0)) return 2;
  if (cuMemAlloc_v2(&memory, 8 << 20) || cuMemsetD8_v2(memory, 7, 8 << 20)) return 3;
  driver = dlopen("libcuda.so.1", RTLD_NOW);
  int (*copy)(void*, unsigned long long, unsigned long) = dlsym(driver, "cuMemcpyDtoH_v2");
  if (dlerror() || copy(&byte, memory, 1)) return 4;
  printf("%d\n", byte);
  copy = dlsym(stub, "cuMemcpyDtoH_v2");
  printf("%d\n", copy(&byte, memory, 1));
  system("ls -l /proc/$PPID/fd | grep -c memfd:stasis-agent");
}
END
  cc -w -shared -fPIC "$dir/stub.c" -o "$dir/stubs/libcuda.so"
  cc -w "$dir/program.c" -o "$dir/program" -ldl "$STASIS_LIBCUDA"
  for preload in 0: "1:$agent"; do
    capture env LD_LIBRARY_PATH="${STASIS_LIBCUDA%/*}" LD_PRELOAD="${preload#*:}" "$dir/program" "$dir/stubs/libcuda.so"
    assert_equal "$status/$out" "0/34"$'\n1\n7\n34\n'"${preload%%:*}"$'\n' "with '${preload#*:}' ($err)"
  done
}

# Containers have older C libraries than the host that it is built on.
@test "the agent needs nothing of the C library for parts of the C++ library that it does not use" {
  ! nm -D --undefined-only "$agent" | grep arc4random || return 1
}

@test "libraries are opened as without the agent" {
  local dir=$BATS_TEST_TMPDIR
  mkdir "$dir/own"
  cat >"$dir/opens.c" <<'END'
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
// From here, so by the paths of this library and not of the program.
void try_all(void) {
  const int modes[] = {RTLD_LAZY | RTLD_NOLOAD, RTLD_NOW, RTLD_NOW | RTLD_DEEPBIND, RTLD_NOW | RTLD_NOLOAD, 0};
  const char* names[] = {"libbypath.so", "$ORIGIN/own/liborigin.so", "./own/librelative.so", "libnowhere.so",
                         "./opens.c", "", 0};
  for (const char** name = names; *name; ++name) {
    for (int i = 0; i < 5; ++i) {
      struct link_map* map = dlopen(*name, modes[i]);
      const char* error = dlerror();
      printf("%s %x: %s, %s\n", *name, modes[i], map ? map->l_name : "no", error ? error : "no error");
    }
  }
  printf("%d\n", dlopen(0, RTLD_NOW) != 0);
}
END
  echo 'void opened(void) {}' >"$dir/empty.c"
  local name tags
  for name in bypath origin relative; do cc -shared -fPIC "$dir/empty.c" -o "$dir/own/lib$name.so"; done
  echo 'void try_all(void); int main(void) { try_all(); return 0; }' >"$dir/main.c"
  for tags in enable disable; do  # DT_RUNPATH, DT_RPATH
    cc -D_GNU_SOURCE -w -shared -fPIC "$dir/opens.c" -o "$dir/libopens.so" -ldl -Wl,-rpath,"\$ORIGIN/own",--$tags-new-dtags
    cc "$dir/main.c" -o "$dir/main" -L"$dir" -lopens -Wl,-rpath,"$dir",--enable-new-dtags
    (cd "$dir" && ./main) >"$dir/without"
    (cd "$dir" && LD_PRELOAD=$agent ./main) >"$dir/with"
    grep -q "^libbypath.so 2: $dir/own/libbypath.so, no error" "$dir/with"
    grep -q "^\$ORIGIN/own/liborigin.so 2: $dir/own/liborigin.so, no error" "$dir/with"
    diff "$dir/without" "$dir/with"
  done
}

# Drivers newer than the simulated one: a handle of the agent's means nothing to them.
@test "calls of later drivers come to the agent as well" {
  local dir=$BATS_TEST_TMPDIR/driver name
  mkdir "$dir"
  # Those that only wait at the gate, with how many arguments. Each answers with the sum of them.
  local waiting=(
    cuMemcpyWithAttributesAsync:5 cuMemcpyWithAttributesAsync_ptsz:5 cuMemcpy3DWithAttributesAsync:3
    cuLaunchHostFunc_v2:4 cuLaunchHostFunc_v2_ptsz:4 cuCtxRecordEvent:2 cuCtxWaitEvent:2 cuGreenCtxRecordEvent:2
    cuGreenCtxWaitEvent:2 cuGraphAddMemcpyNode:6 cuGraphAddMemsetNode:6 cuGraphAddBatchMemOpNode:5 cuGraphAddNode:5
    cuGraphAddNode_v2:6 cuGraphMemcpyNodeSetParams:2 cuGraphMemsetNodeSetParams:2 cuGraphBatchMemOpNodeSetParams:2
    cuGraphNodeSetParams:2 cuGraphInstantiate:5 cuGraphInstantiate_v2:5 cuGraphInstantiateWithFlags:3
    cuGraphInstantiateWithParams:3 cuGraphExecUpdate:4 cuGraphExecUpdate_v2:3 cuGraphExecMemcpyNodeSetParams:4
    cuGraphExecMemsetNodeSetParams:4 cuGraphExecBatchMemOpNodeSetParams:3 cuGraphExecChildGraphNodeSetParams:3
    cuGraphExecNodeSetParams:3 cuTexObjectCreate:4 cuTexRefSetAddress_v2:4 cuTexRefSetAddress2D_v2:4
    cuTexRefSetAddress2D_v3:4)
  {
    for name in "${waiting[@]}"; do
      echo "int ${name%:*}(long a, long b, long c, long d, long e, long f) {"
      echo "  long all[] = {a, b, c, d, e, f}, sum = 0;"
      echo "  for (int i = 0; i < ${name#*:}; ++i) sum += all[i];"
      echo "  return sum; }"
    done
    cat <<'END'
#include <stddef.h>
int cuDriverGetVersion(int* version) { return 0; }
int cuGetErrorName(void) { return 0; }
int cuCtxGetCurrent(void** context) { *context = 0; return 0; }
int cuCtxGetDevice(int* device) { return 201; }
int cuMemCreate(unsigned long long* handle) { *handle = 77; return 0; }
int cuMulticastBindMem_v2(unsigned long long multicast, int device, size_t at, unsigned long long handle, size_t offset,
                          size_t size, unsigned long long flags) {
  return handle == 77 ? (int)(multicast + device + at + offset + size + flags) : -1;
}
int cuMulticastBindAddr_v2(unsigned long long multicast, int device, size_t at, unsigned long long address, size_t size,
                           unsigned long long flags) {
  return (int)(multicast + device + at + address + size + flags);
}
int cuStreamBeginRecaptureToGraph(void* stream, unsigned mode, void* graph, void* callback, void* data) { return 0; }
int cuStreamEndCapture(void* stream, void** graph) { return 0; }
END
  } >"$BATS_TEST_TMPDIR/driver.c"
  cat >"$BATS_TEST_TMPDIR/program.c" <<'END'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
int main(int count, char** names) {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (!driver) return puts(dlerror()), 1;
  struct { int type, asked, location, id; void* windows; unsigned char flags[8]; } memory = {1, 0, 1, 0};
  unsigned long long handle = 0;
  int (*create)(unsigned long long*, size_t, void*, unsigned long long) = dlsym(driver, "cuMemCreate");
  int (*bind)(unsigned long long, int, size_t, unsigned long long, size_t, size_t, unsigned long long) =
      dlsym(driver, "cuMulticastBindMem_v2");
  int (*bind_at)(unsigned long long, int, size_t, unsigned long long, size_t, unsigned long long) =
      dlsym(driver, "cuMulticastBindAddr_v2");
  if (create(&handle, 2 << 20, &memory, 0)) return 2;
  printf("%d %d\n", bind(1, 2, 4, handle, 8, 16, 32), bind_at(1, 2, 4, 8, 16, 32));
  for (int i = 1; i < count; ++i) {
    Dl_info where = {0};
    const int arguments = atoi(strchr(names[i], ':') + 1);
    *strchr(names[i], ':') = 0;
    int (*call)(long, long, long, long, long, long) = dlsym(driver, names[i]);
    if (!call || !dladdr(call, &where) || !strstr(where.dli_fname, "libstasis-preload.so"))
      printf("%s passes by\n", names[i]);
    else if (call(1, 2, 4, 8, 16, 32) != (1 << arguments) - 1)
      printf("%s loses arguments\n", names[i]);
  }
}
END
  cc -w -shared -fPIC "$BATS_TEST_TMPDIR/driver.c" -o "$dir/libcuda.so.1"
  cc "$BATS_TEST_TMPDIR/program.c" -o "$BATS_TEST_TMPDIR/program" -ldl
  capture env LD_LIBRARY_PATH="$dir" LD_PRELOAD="$agent" "$BATS_TEST_TMPDIR/program" "${waiting[@]}"
  assert_equal "$status/$out" $'0/63 63\n' "$err"
}

# A driver that has every call of the list, and answers as the real one: by the version that the program asks for, and
# with other functions where it wants a default stream per thread.
@test "cuGetProcAddress gives the agent's functions in place of all that the driver has" {
  local dir=$BATS_TEST_TMPDIR
  mkdir "$dir/driver"
  cat >"$dir/names.h" <<'END'
#include "calls.h"
#define BOTH_PTSZ(name, ...) GATED(name) GATED(name##_ptsz)
#define BOTH_PTDS(name, ...) GATED(name) GATED(name##_ptds)
#define ALL STASIS_GATED_CALLS(GATED, BOTH_PTSZ, BOTH_PTDS) STASIS_HOOKED_CALLS(HOOK)
END
  # Each answers with its number.
  cat >"$dir/functions.c" <<'END'
#include "names.h"
#define GATED(name, ...) number_of_##name,
#define HOOK GATED
enum { nothing, ALL };
#undef GATED
#define GATED(name, ...) __attribute__((weak)) int name(void) { return number_of_##name; }
ALL
int cuDriverGetVersion(int* version) { return 0; }
int cuGetErrorName(void) { return 0; }
END
  cat >"$dir/find.c" <<'END'
#include <stdio.h>
#include <string.h>
#include "names.h"
#define GATED(name, ...) int name();
#define HOOK GATED
ALL
#undef GATED
#define GATED(name, ...) {#name, name},
static struct { const char* name; int (*function)(); } const all[] = {ALL};
const char* given;
static int (*find(const char* name, int version, unsigned long flags))() {
  for (int part = version / 1000; part > 0; --part) {
    for (int per_thread = flags == 2; per_thread >= 0; --per_thread) {
      const char* const ends[] = {"_ptsz", "_ptds", ""};
      for (int end = per_thread ? 0 : 2; end < (per_thread ? 2 : 3); ++end) {
        char full[100], number[10] = "";
        if (part > 1) sprintf(number, "_v%d", part);
        sprintf(full, "%s%s%s", name, number, ends[end]);
        for (unsigned i = 0; i < sizeof all / sizeof *all; ++i)
          if (!strcmp(all[i].name, full)) return given = all[i].name, all[i].function;
      }
    }
  }
  return given = 0;
}
int cuGetProcAddress_v2(const char* name, void** function, int version, unsigned long flags, int* status) {
  *function = find(name, version, flags);
  if (status) *status = *function ? 0 : 1;
  return *function ? 0 : 500;
}
int cuGetProcAddress(const char* name, void** function, int version, unsigned long flags) {
  return cuGetProcAddress_v2(name, function, version, flags, 0);
}
END
  cat >"$dir/program.c" <<'END'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include "names.h"
#define GATED(name, ...) {#name, 1},
#define HOOK(name) {#name, 0},
static struct { const char* name; int is_gated, is_seen; } all[] = {ALL};
enum { count = sizeof all / sizeof *all };
int main() {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  const char** given = dlsym(driver, "given");
  int (*first)() = dlsym(driver, "cuGetProcAddress_v2");
  int (*ways[4])() = {first, dlsym(driver, "cuGetProcAddress")};
  // As libcudart comes to it.
  if (first("cuGetProcAddress", &ways[2], 2000, 0, 0) || first("cuGetProcAddress", &ways[3], 1000, 0, 0)) return 2;
  for (int i = 0; i < count; ++i) {
    char name[100];
    int length = strlen(strcpy(name, all[i].name));
    if (length > 5 && !strncmp(name + length - 5, "_pt", 3)) name[length -= 5] = 0;
    if (length > 3 && !strncmp(name + length - 3, "_v", 2)) name[length - 3] = 0;
    for (int way = 0; way < 4; ++way)
      for (int version = 1000; version <= 4000; version += 1000)
        for (int flags = 0; flags <= 2; ++flags) {
          void* function = 0;
          Dl_info where = {0};
          if (ways[way](name, &function, version, (unsigned long)flags, (int*)0)) continue;
          if (!dladdr(function, &where) || !strstr(where.dli_fname, "libstasis-preload.so"))
            printf("%s passes by: %s of %d with %d\n", *given, name, version, flags);
          int row = 0;
          while (strcmp(all[row].name, *given)) ++row;
          all[row].is_seen |= 1 << way;
          if (function != dlsym(driver, *given) ||
              (all[row].is_gated && ((int (*)())function)(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0) != row + 1))
            printf("another function for %s\n", *given);
        }
  }
  for (int i = 0; i < count; ++i)
    if (all[i].is_seen != 15) printf("%s is not found\n", all[i].name);
  return count < 200;
}
END
  local include=(-w -I"$dir" -I"$BATS_TEST_DIRNAME/../../preload")
  cc "${include[@]}" -shared -fPIC -Wl,-Bsymbolic "$dir/functions.c" "$dir/find.c" -o "$dir/driver/libcuda.so.1"
  cc "${include[@]}" "$dir/program.c" -o "$dir/program" -ldl
  capture env LD_LIBRARY_PATH="$dir/driver" LD_PRELOAD="$agent" "$dir/program"
  assert_equal "$status/$out" "0/" "$err"
}

@test "a program that leaves no thread-specific data for the agent keeps its own" {
  cat >"$BATS_TEST_TMPDIR/keys.c" <<'END'
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
static pthread_key_t first;
static void *driver, *context;
static void* use(void* unused) {
  unsigned long long at = 0;
  int mine = 0;
  pthread_setspecific(first, &mine);
  ((int (*)(void*))dlsym(driver, "cuCtxSetCurrent"))(context);
  int result = ((int (*)(void*, unsigned long))dlsym(driver, "cuMemAlloc_v2"))(&at, 4 << 20);
  if (!result) result = ((int (*)(unsigned long long))dlsym(driver, "cuMemFree_v2"))(at);
  printf("%d %d\n", result, pthread_getspecific(first) == &mine);
  return unused;
}
int main(void) {
  pthread_key_t more;
  pthread_t thread;
  pthread_key_create(&first, 0);
  while (!pthread_key_create(&more, 0)) continue;
  driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (((int (*)(int))dlsym(driver, "cuInit"))(0)) return 1;
  if (((int (*)(void*, int, int))dlsym(driver, "cuCtxCreate_v2"))(&context, 0, 0)) return 2;
  for (int i = 0; i < 3; ++i)
    if (pthread_create(&thread, 0, use, 0) || pthread_join(thread, 0)) return 3;
}
END
  cc "$BATS_TEST_TMPDIR/keys.c" -o "$BATS_TEST_TMPDIR/keys" -ldl -lpthread
  capture env LD_LIBRARY_PATH="${STASIS_LIBCUDA%/*}" LD_PRELOAD="$agent" "$BATS_TEST_TMPDIR/keys"
  assert_equal "$status/$out" $'0/0 1\n0 1\n0 1\n' "$err"
}

@test "a thread that is to be cancelled comes out of the agent's calls, and the others go on" {
  cat >"$BATS_TEST_TMPDIR/cancel.c" <<'END'
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
static void *driver, *context;
static unsigned long long at;
static int got = -1;
static void* share(void* unused) {
  char handle[64];
  ((int (*)(void*))dlsym(driver, "cuCtxSetCurrent"))(context);
  int (*get)(void*, unsigned long long) = dlsym(driver, "cuIpcGetMemHandle");
  pthread_cancel(pthread_self());
  got = get(handle, at);
  return unused;
}
int main(void) {
  pthread_t thread;
  int (*allocate)(void*, size_t);
  driver = dlopen("libcuda.so.1", RTLD_NOW);
  allocate = dlsym(driver, "cuMemAlloc_v2");
  if (((int (*)(int))dlsym(driver, "cuInit"))(0)) return 1;
  if (((int (*)(void*, int, int))dlsym(driver, "cuCtxCreate_v2"))(&context, 0, 0)) return 2;
  if (allocate(&at, 4 << 20)) return 3;
  if (pthread_create(&thread, 0, share, 0) || pthread_join(thread, 0)) return 4;
  printf("%d %d\n", got, allocate(&at, 4 << 20));
}
END
  cc "$BATS_TEST_TMPDIR/cancel.c" -o "$BATS_TEST_TMPDIR/cancel" -ldl -lpthread
  capture env LD_LIBRARY_PATH="${STASIS_LIBCUDA%/*}" LD_PRELOAD="$agent" timeout 60 "$BATS_TEST_TMPDIR/cancel"
  assert_equal "$status/$out" $'0/0 0\n' "$err"
}

@test "where there is no thread for the agent at first, it comes with a later allocation" {
  cat >"$BATS_TEST_TMPDIR/short.c" <<'END'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
int are_short;
int pthread_create(pthread_t* thread, const pthread_attr_t* how, void* (*run)(void*), void* with) {
  int (*next)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*) = dlsym(RTLD_NEXT, "pthread_create");
  return are_short ? EAGAIN : next(thread, how, run, with);
}
END
  cat >"$BATS_TEST_TMPDIR/program.c" <<'END'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
int main(void) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW), *context;
  unsigned long long at;
  int* are_short = dlsym(RTLD_DEFAULT, "are_short");
  int (*allocate)(void*, size_t) = dlsym(driver, "cuMemAlloc_v2");
  if (((int (*)(int))dlsym(driver, "cuInit"))(0)) return 1;
  if (((int (*)(void*, int, int))dlsym(driver, "cuCtxCreate_v2"))(&context, 0, 0)) return 2;
  for (*are_short = 1; *are_short >= 0; --*are_short)
    if (allocate(&at, 4 << 20) || system("ls -l /proc/$PPID/fd | grep -c memfd:stasis-agent") < 0) return 3;
}
END
  cc -shared -fPIC "$BATS_TEST_TMPDIR/short.c" -o "$BATS_TEST_TMPDIR/short.so" -ldl
  cc "$BATS_TEST_TMPDIR/program.c" -o "$BATS_TEST_TMPDIR/program" -ldl
  capture env LD_LIBRARY_PATH="${STASIS_LIBCUDA%/*}" LD_PRELOAD="$BATS_TEST_TMPDIR/short.so:$agent" "$BATS_TEST_TMPDIR/program"
  assert_equal "$status/$out" $'0/0\n1\n' "$err"
}
