// What the driver saves of a context in which a program has hardly any memory of its own, and what
// makes it less.
//
// A process has a context, runs a kernel that uses 8 KiB of local memory a thread, and sets limits;
// another one locks, checkpoints, restores and unlocks it, and looks at what lies in its memory
// meanwhile. By hand, where there is a GPU and libnvidia-ptxjitcompiler:
//   cc -O2 tests/gpu/context_memory.c -I/usr/local/cuda/include -L/usr/local/cuda/lib64/stubs -lcuda
// What was seen: docs/results/2026-11-22-context-memory.md.
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
static double now() {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}
#define C(x)                      \
  do {                            \
    CUresult r_ = (x);            \
    if (r_) {                     \
      printf("%s: %d\n", #x, r_); \
      fflush(stdout);             \
    }                             \
  } while (0)
static const char* PTX =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry k(.param .u64 out,.param .u32 n){\n"
    ".local .align 16 .b8 buf[8192];\n"
    ".reg .u64 %p,%l,%o,%q; .reg .u32 %t,%i,%v,%n,%s; .reg .pred %c;\n"
    "ld.param.u64 %o,[out]; ld.param.u32 %n,[n]; mov.u64 %l,buf; cvta.local.u64 %p,%l;\n"
    "mov.u32 %t,%tid.x; mov.u32 %i,0; mov.u32 %s,0;\n"
    "L: mul.lo.u32 %v,%i,4; cvt.u64.u32 %q,%v; add.u64 %q,%q,%p; add.u32 %v,%i,%t; st.u32 [%q],%v; "
    "add.u32 %i,%i,1; setp.lt.u32 %c,%i,%n; @%c bra L;\n"
    "mov.u32 %i,0;\n"
    "M: mul.lo.u32 %v,%i,4; cvt.u64.u32 %q,%v; add.u64 %q,%q,%p; ld.u32 %v,[%q]; add.u32 %s,%s,%v; "
    "add.u32 %i,%i,1; setp.lt.u32 %c,%i,%n; @%c bra M;\n"
    "mul.wide.u32 %q,%t,4; add.u64 %q,%q,%o; st.global.u32 [%q],%s; ret;}\n";
static CUresult (*ck_lock)(int, void*), (*ck_cp)(int, void*), (*ck_re)(int, void*),
    (*ck_un)(int, void*);
static size_t freemem() {
  size_t f = 0, t;
  cuMemGetInfo(&f, &t);
  return f;
}
static CUmodule mod;
static CUfunction fn;
static CUdeviceptr out;
static void kernel() {
  if (!fn) {
    C(cuModuleLoadData(&mod, PTX));
    C(cuModuleGetFunction(&fn, mod, "k"));
    C(cuMemAlloc(&out, 4096));
  }
  unsigned n = 1000;
  void* a[] = {&out, &n};
  C(cuLaunchKernel(fn, 132, 1, 1, 256, 1, 1, 0, 0, a, 0));
  C(cuCtxSynchronize());
  unsigned h[256];
  C(cuMemcpyDtoH(h, out, 1024));
  unsigned w = 999u * 1000 / 2 + 1000u * 7;
  printf("   kernel %s\n", h[7] == w ? "right" : "WRONG");
}
static void limits() {
  for (int i = 0; i < 7; i++) {
    size_t v = 0;
    CUresult r = cuCtxGetLimit(&v, i);
    printf(" limit%d=%zu(%d)", i, v, r);
  }
  printf("\n");
}
static int req[2], ans[2];
static void ask(char c) {
  char r;
  if (write(req[1], &c, 1) != 1) exit(1);
  if (read(ans[0], &r, 1) != 1) exit(1);
}
static void scan(int pid, int list) {
  char p[64];
  sprintf(p, "/proc/%d/smaps", pid);
  FILE* f = fopen(p, "r");
  char l[512];
  unsigned long a = 0, b = 0;
  char perm[8] = "";
  sprintf(p, "/proc/%d/mem", pid);
  int m = open(p, O_RDONLY);
  static unsigned char buf[1 << 20];
  size_t total = 0;
  while (fgets(l, sizeof l, f)) {
    unsigned long x, y;
    char q[8];

    if (sscanf(l, "%lx-%lx %7s", &x, &y, q) == 3 && strchr(l, '-') && l[0] != ' ' &&
        (strstr(l, "r") || 1) && strchr("0123456789abcdef", l[0]) && strlen(q) == 4) {
      a = x;
      b = y;
      strcpy(perm, q);
    }
    unsigned long kb;
    if (sscanf(l, "Rss: %lu kB", &kb) == 1 && kb > 20000 && perm[3] == 'p' && perm[1] == 'w') {
      printf("   area %lx-%lx %s %lu MiB rss %lu MiB\n", a, b, perm, (b - a) >> 20, kb >> 10);
      total += kb;
      size_t zero = 0, pages = 0, same = 0;
      char map[4096];
      int mi = 0;
      for (unsigned long o = a; o < b; o += 1 << 20) {
        size_t n = b - o < (1 << 20) ? b - o : (1 << 20);
        ssize_t g = pread(m, buf, n, o);
        if (g <= 0) {
          map[mi++] = '?';
          continue;
        }
        int nz = 0, np = 0;
        for (ssize_t i = 0; i + 4096 <= g; i += 4096) {
          int z = 1;
          uint64_t* w = (uint64_t*)(buf + i);
          for (int k = 0; k < 512; k++)
            if (w[k]) {
              z = 0;
              break;
            }
          zero += z;
          pages++;
          nz += !z;
          np++;
          if (!z) {
            int s = 1;
            for (int k = 1; k < 512; k++)
              if (w[k] != w[0]) {
                s = 0;
                break;
              }
            same += s;
          }
        }
        if (mi < 4000) map[mi++] = nz == 0 ? '.' : nz == np ? '#' : '0' + nz * 10 / np;
      }
      map[mi] = 0;
      printf("   pages %zu zero %zu (%.1f%%) one word again and again %zu\n", pages, zero,
             100.0 * zero / pages, same);
      if (list) printf("   %s\n", map);
    }
  }
  fclose(f);
  close(m);
  printf("   areas %zu MiB\n", total >> 10);
}
static void helper(int pid, int list) {
  void* l = dlopen("libcuda.so.1", RTLD_NOW);
  cuInit(0);
  *(void**)&ck_lock = dlsym(l, "cuCheckpointProcessLock");
  *(void**)&ck_cp = dlsym(l, "cuCheckpointProcessCheckpoint");
  *(void**)&ck_re = dlsym(l, "cuCheckpointProcessRestore");
  *(void**)&ck_un = dlsym(l, "cuCheckpointProcessUnlock");
  char c;
  while (read(req[0], &c, 1) == 1) {
    char args[256];
    memset(args, 0, sizeof args);
    double t0 = now();
    CUresult r1 = ck_lock(pid, args);
    double t1 = now();
    CUresult r2 = ck_cp(pid, args);
    double t2 = now();
    scan(pid, c == 'l');
    double t3 = now();
    CUresult r3 = ck_re(pid, args);
    double t4 = now();
    CUresult r4 = ck_un(pid, args);
    double t5 = now();
    printf("   lock %d %.1f ms checkpoint %d %.1f ms restore %d %.1f ms unlock %d %.1f ms\n", r1,
           (t1 - t0) * 1e3, r2, (t2 - t1) * 1e3, r3, (t4 - t3) * 1e3, r4, (t5 - t4) * 1e3);
    fflush(stdout);
    if (write(ans[1], "x", 1) != 1) exit(1);
  }
  exit(0);
}
int main(int ac, char** av) {
  setvbuf(stdout, 0, _IOLBF, 0);
  int flags = ac > 1 ? atoi(av[1]) : 0;
  if (pipe(req) || pipe(ans)) return 1;
  int pid = getpid();
  if (fork() == 0) {
    close(req[1]);
    helper(pid, 0);
  }
  close(req[0]);
  C(cuInit(0));
  CUdevice d;
  CUcontext c;
  C(cuDeviceGet(&d, 0));
  size_t f0;
  if (flags) C(cuDevicePrimaryCtxSetFlags(d, flags));
  double t = now();
  C(cuDevicePrimaryCtxRetain(&c, d));
  C(cuCtxSetCurrent(c));
  printf("context %.0f ms\n", (now() - t) * 1e3);
  f0 = freemem();
  printf("free %zu MiB", f0 >> 20);
  limits();
  printf("1. nothing but the context\n");
  ask('l');
  ask('s');
  kernel();
  printf("2. after a kernel with 8 KiB of local memory: free %zu MiB", freemem() >> 20);
  limits();
  ask('s');
  kernel();
  size_t v[] = {0, 16, 256, 512, 1024, 8192};
  for (int i = 0; i < 6; i++) {
    size_t b = freemem();
    double t = now();
    CUresult r = cuCtxSetLimit(CU_LIMIT_STACK_SIZE, v[i]);
    double e = now();
    printf("3. stack size %zu: %d in %.2f ms, free %zu -> %zu MiB", v[i], r, (e - t) * 1e3, b >> 20,
           freemem() >> 20);
    limits();
    ask('s');
    double k = now();
    kernel();
    printf("   first kernel after it %.2f ms, free %zu MiB\n", (now() - k) * 1e3, freemem() >> 20);
  }
  {
    size_t b = freemem();
    CUresult r = cuCtxSetLimit(CU_LIMIT_PRINTF_FIFO_SIZE, 4096);
    printf("4. printf fifo 4096: %d, free %zu -> %zu MiB", r, b >> 20, freemem() >> 20);
    limits();
    b = freemem();
    r = cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, 4096);
    printf("   malloc heap 4096: %d, free %zu -> %zu MiB", r, b >> 20, freemem() >> 20);
    limits();
    b = freemem();
    r = cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 0);
    printf("   stack 0: %d, free %zu -> %zu MiB", r, b >> 20, freemem() >> 20);
    limits();
    ask('l');
    kernel();
  }
  close(req[1]);
  while (wait(0) > 0)
    ;
  return 0;
}
