// XXH3-128 of many chunks at once, up to the eight accumulators of each chunk. What comes before
// (the keys) and after (the digest) is image/xxh3_lanes.h.
//
// Eight threads work on a chunk, each on one accumulator. A thread reads its neighbour's word
// itself instead of asking for it, as both are in the cache: so no thread waits for another.
// gpu_digest_ptx.h is what nvcc makes of this; its head says how.
typedef unsigned long long u64;

constexpr unsigned kLanes = 8;    // words of a stripe
constexpr unsigned kStripes = 16; // of a block
constexpr u64 kBlock = kLanes * kStripes;  // words

// `keys`: for each lane those of a block's stripes, of the scramble, and of the last stripe.
// `blocks`: in a chunk, 1024 bytes each. `out`: the accumulators, chunk by chunk.
extern "C" __global__ void stasis_xxh3_lanes(const u64* __restrict__ data,
                                             const u64* __restrict__ keys, u64 chunks, u64 blocks,
                                             u64* __restrict__ out) {
  const u64 thread = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const u64 chunk = thread / kLanes;
  const unsigned lane = thread % kLanes;
  if (chunk >= chunks) return;
  u64 key[kStripes];
#pragma unroll
  for (unsigned s = 0; s < kStripes; ++s)
    key[s] = keys[lane * (kStripes + 3) + s];
  const u64 scramble = keys[lane * (kStripes + 3) + kStripes];
  const u64 last = keys[lane * (kStripes + 3) + kStripes + 1];
  u64 sum = keys[lane * (kStripes + 3) + kStripes + 2];
  const u64* at = data + chunk * blocks * kBlock;
  for (u64 block = 0; block < blocks; ++block, at += kBlock) {
    const bool end = block + 1 == blocks;
    u64 own[kStripes], other[kStripes];
#pragma unroll
    for (unsigned s = 0; s < kStripes; ++s) {
      own[s] = at[s * kLanes + lane];
      other[s] = at[s * kLanes + (lane ^ 1)];
    }
#pragma unroll
    for (unsigned s = 0; s < kStripes; ++s) {
      const u64 mixed = own[s] ^ (s + 1 == kStripes && end ? last : key[s]);
      sum += other[s] + (mixed & 0xffffffffu) * (mixed >> 32);
    }
    if (!end) {
      sum ^= sum >> 47;
      sum ^= scramble;
      sum *= 0x9E3779B1u;
    }
  }
  out[chunk * kLanes + lane] = sum;
}
