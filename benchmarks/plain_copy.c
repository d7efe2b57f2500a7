/* The baseline of the transfer benchmark: the same descriptors, copied by one thread with the C library's memcpy. */
#include <stdint.h>
#include <string.h>

void plain_copy(const uint64_t *to, const uint64_t *from, const uint64_t *bytes, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        memcpy((void *)(uintptr_t)to[i], (const void *)(uintptr_t)from[i], bytes[i]);
}
