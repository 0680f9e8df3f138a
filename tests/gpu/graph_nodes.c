// Whether the nodes of a CUDA graph that was instantiated before a suspend can still be changed
// after the resume: the driver's manual says that setting the parameters of a copy fails where the
// mappings of its operands have changed, and the direct path maps other memory at their addresses.
//
// Says "ready PID" and waits for a line on standard input; then it launches the graph, sets each
// node anew and launches it again, and says what the driver answers and whether the memory is right
// (1). Three times; suspend and resume it in between. By hand, where there is a GPU:
//   cc tests/gpu/graph_nodes.c -I/usr/local/cuda/include -L/usr/local/cuda/lib64/stubs -lcuda
// What was seen: docs/results/2026-11-23-whole-suspend.md.
#include <cuda.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#define C(x)                  \
  do {                        \
    CUresult r_ = (x);        \
    printf("%s: %d\n", #x, r_); \
    fflush(stdout);           \
  } while (0)

enum { N = 16 << 20 };
static CUdeviceptr a, b, c;

static int right(CUdeviceptr p, unsigned char value) {
  static unsigned char host[N];
  if (cuMemcpyDtoH(host, p, N)) return -1;
  for (int i = 0; i < N; ++i)
    if (host[i] != value) return 0;
  return 1;
}

int main(void) {
  CUcontext ctx;
  CUdevice d;
  CUgraph g;
  CUgraphExec e;
  CUgraphNode n, m;
  CUstream s;
  cuInit(0);
  cuDeviceGet(&d, 0);
  cuDevicePrimaryCtxRetain(&ctx, d);
  cuCtxSetCurrent(ctx);
  cuStreamCreate(&s, CU_STREAM_NON_BLOCKING);
  cuMemAlloc(&a, N);
  cuMemAlloc(&b, N);
  cuMemAlloc(&c, N);
  cuMemsetD8(a, 1, N);
  cuMemsetD8(c, 3, N);
  cuCtxSynchronize();
  CUDA_MEMCPY3D p;
  memset(&p, 0, sizeof p);
  p.srcMemoryType = p.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  p.srcDevice = a;
  p.dstDevice = b;
  p.WidthInBytes = N;
  p.Height = p.Depth = 1;
  p.srcPitch = p.dstPitch = N;
  p.srcHeight = p.dstHeight = 1;
  CUDA_MEMSET_NODE_PARAMS q;
  memset(&q, 0, sizeof q);
  q.dst = c;
  q.value = 7;
  q.elementSize = 1;
  q.width = N;
  q.height = 1;
  q.pitch = N;
  C(cuGraphCreate(&g, 0));
  C(cuGraphAddMemcpyNode(&n, g, 0, 0, &p, ctx));
  C(cuGraphAddMemsetNode(&m, g, &n, 1, &q, ctx));
  C(cuGraphInstantiateWithFlags(&e, g, 0));
  C(cuGraphLaunch(e, s));
  C(cuStreamSynchronize(s));
  printf("b %d c %d\n", right(b, 1), right(c, 7));
  fflush(stdout);
  char line[64];
  for (int round = 0; round < 3; ++round) {
    printf("ready %d\n", getpid());
    fflush(stdout);
    if (!fgets(line, sizeof line, stdin)) return 1;
    cuMemsetD8(a, 20 + round, N);
    cuMemsetD8(c, 40 + round, N);
    cuCtxSynchronize();
    C(cuGraphLaunch(e, s));
    C(cuStreamSynchronize(s));
    printf("b %d c %d\n", right(b, 20 + round), right(c, 7));
    fflush(stdout);
    C(cuGraphExecMemcpyNodeSetParams(e, n, &p, ctx));
    C(cuGraphExecMemsetNodeSetParams(e, m, &q, ctx));
    p.srcDevice = c;
    C(cuGraphExecMemcpyNodeSetParams(e, n, &p, ctx));
    p.srcDevice = a;
    C(cuGraphExecMemcpyNodeSetParams(e, n, &p, ctx));
    C(cuGraphMemcpyNodeSetParams(n, &p));
    CUgraphExecUpdateResultInfo info;
    C(cuGraphExecUpdate(e, g, &info));
    printf("update %d\n", info.result);
    C(cuGraphLaunch(e, s));
    C(cuStreamSynchronize(s));
    printf("b %d c %d\n", right(b, 20 + round), right(c, 7));
    fflush(stdout);
  }
  return 0;
}
