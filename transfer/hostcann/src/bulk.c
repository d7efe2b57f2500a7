#include "bulk.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>

/*
 * Plain stores first fetch the line they overwrite, a third of the traffic of a copy; non-temporal ones do not. Below
 * this size the reader of a copy gains more from finding it in the cache. (512-bit stores were measured to be no faster.)
 */
#define STREAM_AT_LEAST ((size_t)4096)
#define LINE ((size_t)64)
#define STEP ((size_t)128)
#define AHEAD ((size_t)1024) /* of the loads, in bytes */

__attribute__((target("avx2"))) static inline void stream_step(char *to, const char *from)
{
    __m256i a = _mm256_loadu_si256((const __m256i *)from);
    __m256i b = _mm256_loadu_si256((const __m256i *)(from + 32));
    __m256i c = _mm256_loadu_si256((const __m256i *)(from + 64));
    __m256i d = _mm256_loadu_si256((const __m256i *)(from + 96));
    _mm256_stream_si256((__m256i *)to, a);
    _mm256_stream_si256((__m256i *)(to + 32), b);
    _mm256_stream_si256((__m256i *)(to + 64), c);
    _mm256_stream_si256((__m256i *)(to + 96), d);
}

/* Ranges that do not overlap. */
__attribute__((target("avx2"))) static void stream(char *to, const char *from, size_t bytes)
{
    size_t head = -(uintptr_t)to & (LINE - 1);
    memcpy(to, from, head);
    size_t i = head;
    for (; i + AHEAD + STEP <= bytes; i += STEP) {
        _mm_prefetch(from + i + AHEAD, _MM_HINT_T0);
        _mm_prefetch(from + i + AHEAD + LINE, _MM_HINT_T0);
        stream_step(to + i, from + i);
    }
    for (; i + STEP <= bytes; i += STEP)
        stream_step(to + i, from + i);
    memcpy(to + i, from + i, bytes - i);
}

static bool may_stream(const char *to, const char *from, size_t bytes)
{
    bool apart = to + bytes <= from || from + bytes <= to;
    return bytes >= STREAM_AT_LEAST && apart && __builtin_cpu_supports("avx2");
}
#endif

void hc_bulk_copy(void *destination, const void *source, size_t bytes)
{
#if defined(__x86_64__)
    if (may_stream(destination, source, bytes)) {
        stream(destination, source, bytes);
        return;
    }
#endif
    memmove(destination, source, bytes);
}

void hc_bulk_fence(void)
{
#if defined(__x86_64__)
    _mm_sfence();
#endif
}
