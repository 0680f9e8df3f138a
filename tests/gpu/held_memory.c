// What becomes of device memory that another process holds while the driver checkpoints its owner.
//
// The owner exports two allocations of 2 GiB, another process imports and maps them, the owner lets
// them go and is checkpointed and restored, and imports them back. Then it tries to export them
// again, and the driver checkpoints it with what it has imported. By hand, where there is a GPU:
//   cc -O1 tests/gpu/held_memory.c -I/usr/local/cuda/include -L/usr/local/cuda/lib64/stubs -lcuda
// What was seen: docs/results/2026-11-22-h200.md.
#define _GNU_SOURCE
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
static const char* who;
static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}
#define SAY(x)                                                \
  ({                                                          \
    double t_ = now();                                        \
    CUresult r_ = (x);                                        \
    printf("%s %-58s %d  %.4f s\n", who, #x, r_, now() - t_); \
    fflush(stdout);                                           \
    r_;                                                       \
  })
#define CK(x)                                   \
  do {                                          \
    CUresult r_ = (x);                          \
    if (r_) {                                   \
      printf("%s FAILED %s %d\n", who, #x, r_); \
      exit(1);                                  \
    }                                           \
  } while (0)
enum { N = 2 };
static const size_t S = (size_t)2 << 30;
static void put(int s, char c, int* fds, int n) {
  struct iovec v = {&c, 1};
  char b[CMSG_SPACE(sizeof(int) * N)];
  memset(b, 0, sizeof b);
  struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1};
  if (n) {
    m.msg_control = b;
    m.msg_controllen = CMSG_SPACE(sizeof(int) * n);
    struct cmsghdr* h = CMSG_FIRSTHDR(&m);
    h->cmsg_level = SOL_SOCKET;
    h->cmsg_type = SCM_RIGHTS;
    h->cmsg_len = CMSG_LEN(sizeof(int) * n);
    memcpy(CMSG_DATA(h), fds, sizeof(int) * n);
  }
  sendmsg(s, &m, 0);
}
static char get(int s, int* fds) {
  char c = 0;
  struct iovec v = {&c, 1};
  char b[CMSG_SPACE(sizeof(int) * N)];
  struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = b, .msg_controllen = sizeof b};
  if (recvmsg(s, &m, 0) != 1) {
    printf("%s: the other is gone\n", who);
    exit(1);
  }
  struct cmsghdr* h = CMSG_FIRSTHDR(&m);
  if (h && fds) memcpy(fds, CMSG_DATA(h), sizeof(int) * N);
  return c;
}
static CUmemAllocationProp prop(void) {
  CUmemAllocationProp p;
  memset(&p, 0, sizeof p);
  p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  p.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return p;
}
static void map(CUdeviceptr va, CUmemGenericAllocationHandle h) {
  CK(cuMemMap(va, S, 0, h, 0));
  CUmemAccessDesc a = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  CK(cuMemSetAccess(va, S, &a, 1));
}
static int good(CUdeviceptr va) {
  unsigned w[3];
  for (int i = 0; i < N; i++)
    for (int k = 0; k < 3; k++) {
      CK(cuMemcpyDtoH(&w[k], va + i * S + k * (S / 3 & ~3ul), 4));
      if (w[k] != 0xa0u + i) return 0;
    }
  return 1;
}
static CUcontext ctx;
static void init(void) {
  CK(cuInit(0));
  CUdevice d;
  CK(cuDeviceGet(&d, 0));
  CK(cuDevicePrimaryCtxRetain(&ctx, d));
  CK(cuCtxSetCurrent(ctx));
}
static void target(int s) {
  who = "target    ";
  init();
  CUdeviceptr va;
  CK(cuMemAddressReserve(&va, N * S, 0, 0, 0));
  CUmemAllocationProp p = prop();
  CUmemGenericAllocationHandle h[N];
  int fd[N];
  for (int i = 0; i < N; i++) {
    CK(cuMemCreate(&h[i], S, &p, 0));
    map(va + i * S, h[i]);
    CK(cuMemsetD32(va + i * S, 0xa0 + i, S / 4));
    CK(cuMemExportToShareableHandle(&fd[i], h[i], CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  }
  CK(cuCtxSynchronize());
  put(s, 'e', fd, N);
  for (int i = 0; i < N; i++)
    close(fd[i]);
  for (;;) {
    char c = get(s, fd);
    if (c == 'r') {
      for (int i = 0; i < N; i++) {
        SAY(cuMemUnmap(va + i * S, S));
        SAY(cuMemRelease(h[i]));
      }
    } else if (c == 't') {
      double t = now();
      for (int i = 0; i < N; i++) {
        SAY(cuMemImportFromShareableHandle(&h[i], (void*)(long)fd[i],
                                           CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
        map(va + i * S, h[i]);
        close(fd[i]);
      }
      printf("target     took it back in %.4f s; content good: %d\n", now() - t, good(va));
    } else if (c == 'v') {
      printf("target     content good: %d\n", good(va));
      CUmemAllocationProp q;
      SAY(cuMemGetAllocationPropertiesFromHandle(&q, h[0]));
      printf("target     handle types %d\n", q.requestedHandleTypes);
    } else if (c == 'x') {
      int ok = 1;
      for (int i = 0; i < N; i++)
        ok &= !SAY(cuMemExportToShareableHandle(&fd[i], h[i],
                                                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
      put(s, ok ? 'e' : 'n', fd, ok ? N : 0);
      if (ok)
        for (int i = 0; i < N; i++)
          close(fd[i]);
      continue;
    } else if (c == 'q')
      exit(0);
    put(s, 'o', 0, 0);
  }
}
static void used(void) {
  size_t f, t;
  cuMemGetInfo(&f, &t);
  printf("controller GPU memory in use: %.2f GiB\n", (double)(t - f) / 1073741824.0);
}
static int cycle(int pid) {
  CUcheckpointLockArgs l;
  memset(&l, 0, sizeof l);
  l.timeoutMs = 10000;
  int bad = SAY(cuCheckpointProcessLock(pid, &l));
  bad |= SAY(cuCheckpointProcessCheckpoint(pid, 0));
  used();
  bad |= SAY(cuCheckpointProcessRestore(pid, 0));
  bad |= SAY(cuCheckpointProcessUnlock(pid, 0));
  return bad;
}
static void hold(CUdeviceptr va, int* fd, CUmemGenericAllocationHandle* h) {
  for (int i = 0; i < N; i++) {
    SAY(cuMemImportFromShareableHandle(&h[i], (void*)(long)fd[i],
                                       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    map(va + i * S, h[i]);
  }
  printf("controller content good: %d\n", good(va));
}
static void drop(CUdeviceptr va, CUmemGenericAllocationHandle* h) {
  for (int i = 0; i < N; i++) {
    CK(cuMemUnmap(va + i * S, S));
    CK(cuMemRelease(h[i]));
  }
}
int main(int c, char** v) {
  if (c > 1) target(atoi(v[1]));
  int s[2];
  socketpair(AF_UNIX, SOCK_SEQPACKET, 0, s);
  pid_t pid = fork();
  if (!pid) {
    close(s[0]);
    char n[9];
    snprintf(n, sizeof n, "%d", s[1]);
    execl("/proc/self/exe", "held-memory", n, (char*)0);
  }
  close(s[1]);
  who = "controller";
  int fd[N];
  get(s[0], fd);
  init();
  used();
  CUdeviceptr va;
  CK(cuMemAddressReserve(&va, N * S, 0, 0, 0));
  CUmemGenericAllocationHandle h[N];
  for (int round = 0; round < 2; round++) {
    printf("== round %d: held by the other while the driver checkpoints it\n", round);
    hold(va, fd, h);
    put(s[0], 'r', 0, 0);
    get(s[0], 0);
    used();
    if (cycle(pid)) printf("!! cycle failed\n");
    printf("controller content good after the checkpoint: %d\n", good(va));
    put(s[0], 't', fd, N);
    get(s[0], 0);
    drop(va, h);
    for (int i = 0; i < N; i++)
      close(fd[i]);
    put(s[0], 'v', 0, 0);
    get(s[0], 0);
    used();
    put(s[0], 'x', 0, 0);
    int f2[N];
    if (get(s[0], f2) != 'e') {
      printf("!! what was imported cannot be exported again\n");
      break;
    }
    memcpy(fd, f2, sizeof fd);
  }
  for (int i = 0; i < N; i++)
    close(fd[i]);
  printf("== by the driver alone, with memory that was imported\n");
  if (cycle(pid)) printf("!! cycle failed\n");
  put(s[0], 'v', 0, 0);
  get(s[0], 0);
  put(s[0], 'q', 0, 0);
  waitpid(pid, 0, 0);
  return 0;
}
