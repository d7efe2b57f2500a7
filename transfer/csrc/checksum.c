// Checksums of memory ranges: four interleaved CRC-32C streams, so that the processor's CRC unit is never waited for.
//
// Stream s takes the 64-bit words s, s + 4, s + 8, ... of a range; bytes behind the last whole group of four words go to
// stream 0. The range's length and the streams' values are then mixed by multiplications: the CRC of CRCs would be linear,
// and not notice words that changed places between streams. The result is the same on every little-endian machine.

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

enum { STREAMS = 4, WORD = 8, GROUP = STREAMS * WORD, LINE = 2 * GROUP };
enum { AHEAD = 2048 };  // bytes that are fetched before their turn: the processor's own prefetch stops at each page

static uint64_t word_at(const unsigned char *bytes) {
  uint64_t word;
  memcpy(&word, bytes, sizeof word);
  return word;
}

static uint64_t mixed(uint64_t value) {
  value *= 0x9e3779b97f4a7c15u;  // 2^64 divided by the golden ratio
  return value ^ (value >> 32);
}

static uint32_t table[8][256];  // table[k][b]: byte b, followed by k zero bytes

__attribute__((constructor)) static void fill_table(void) {
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0x82f63b78u : 0);
    table[0][byte] = crc;
  }
  for (int k = 1; k < 8; ++k)
    for (int byte = 0; byte < 256; ++byte)
      table[k][byte] = (table[k - 1][byte] >> 8) ^ table[0][table[k - 1][byte] & 255];
}

static uint32_t portable_word(uint32_t crc, uint64_t word) {
  word ^= crc;
  uint32_t next = 0;
  for (int k = 0; k < 8; ++k) next ^= table[7 - k][(word >> (8 * k)) & 255];
  return next;
}

static uint32_t portable_byte(uint32_t crc, unsigned char byte) { return (crc >> 8) ^ table[0][(crc ^ byte) & 255]; }

// The same function for each way to step a CRC by a word and by a byte.
#define STEP_GROUP(step_word, from) \
  for (int s = 0; s < STREAMS; ++s) crc[s] = step_word(crc[s], word_at((from) + s * WORD))
#define DEFINE_CHECKSUM(name, attributes, step_word, step_byte)                   \
  attributes static uint32_t name(const unsigned char *bytes, uint64_t size) {    \
    uint32_t crc[STREAMS] = {~0u, ~1u, ~2u, ~3u};                                 \
    uint64_t at = 0;                                                              \
    for (; at + LINE <= size; at += LINE) {                                       \
      __builtin_prefetch(bytes + at + AHEAD);                                     \
      STEP_GROUP(step_word, bytes + at);                                          \
      STEP_GROUP(step_word, bytes + at + GROUP);                                  \
    }                                                                             \
    for (; at + GROUP <= size; at += GROUP) STEP_GROUP(step_word, bytes + at);    \
    for (; at < size; ++at) crc[0] = step_byte(crc[0], bytes[at]);                \
    uint64_t all = size;                                                          \
    for (int s = 0; s < STREAMS; ++s) all = mixed(all ^ crc[s]);                  \
    return (uint32_t)(all >> 32);                                                 \
  }

DEFINE_CHECKSUM(checksum_portable, , portable_word, portable_byte)

#if defined(__x86_64__)
#define FAST_WORD(crc, word) ((uint32_t)_mm_crc32_u64((crc), (word)))
DEFINE_CHECKSUM(checksum_fast, __attribute__((target("sse4.2"))), FAST_WORD, _mm_crc32_u8)
static int has_fast(void) { return __builtin_cpu_supports("sse4.2"); }
#elif defined(__ARM_FEATURE_CRC32)
DEFINE_CHECKSUM(checksum_fast, , __crc32cd, __crc32cb)
static int has_fast(void) { return 1; }
#else
#define checksum_fast checksum_portable
static int has_fast(void) { return 0; }
#endif

typedef uint32_t (*Checksum)(const unsigned char *, uint64_t);

static Checksum choose(int portable) { return !portable && has_fast() ? checksum_fast : checksum_portable; }

// sums[i] = the checksum of sizes[i] bytes at addresses[i]. `portable`: without the processor's CRC unit, for tests.
void sluice_checksums(uint64_t count, const uint64_t *addresses, const uint64_t *sizes, uint32_t *sums, int portable) {
  Checksum checksum = choose(portable);
  for (uint64_t i = 0; i < count; ++i) sums[i] = checksum((const unsigned char *)(uintptr_t)addresses[i], sizes[i]);
}

// sums[i] = `seed`, then the checksums of block blocks[t * count + i] of every paged tensor t, mixed in this order. A
// tensor's block b is block_bytes[t] bytes at addresses[t] + b * block_bytes[t].
void sluice_block_checksums(uint64_t seed, uint64_t count, uint64_t tensors, const uint64_t *addresses,
                            const uint64_t *block_bytes, const uint64_t *blocks, uint32_t *sums, int portable) {
  Checksum checksum = choose(portable);
  for (uint64_t i = 0; i < count; ++i) {
    uint64_t all = mixed(seed);
    for (uint64_t t = 0; t < tensors; ++t) {
      uint64_t address = addresses[t] + blocks[t * count + i] * block_bytes[t];
      all = mixed(all ^ checksum((const unsigned char *)(uintptr_t)address, block_bytes[t]));
    }
    sums[i] = (uint32_t)(all >> 32);
  }
}
