/*
 * libmf_hybm_accoffload.so: the copy kernels behind memfabric_hybrid.offload, here as loops over hostcann_copy.
 *
 * The original is compiled on an NPU machine; these are its entry points.
 */
#include <stdint.h>
#include <stdio.h>

#include "errors.h"
#include "hostcann.h"

/* Copy *count ranges: length[i] bytes from source[i] to destination[i]. */
HOSTCANN_API int AccOffloadSparseCopy(const uint64_t *source, const uint64_t *destination, const uint32_t *length,
                                      const uint32_t *count, uint8_t device)
{
    for (uint32_t i = 0; i < *count; i++) {
        int result = hostcann_copy(device, (void *)(uintptr_t)destination[i], (const void *)(uintptr_t)source[i], length[i]);
        if (result != ACL_OK)
            return result;
    }
    return ACL_OK;
}

static int refuse(const char *symbol)
{
    fprintf(stderr, "hostcann: %s is not emulated\n", symbol);
    return ACL_ERROR_UNSUPPORTED;
}

HOSTCANN_API int AccOffloadGroupPackCopy(void)
{
    return refuse("AccOffloadGroupPackCopy");
}

HOSTCANN_API int AccOffloadKvExchange(void)
{
    return refuse("AccOffloadKvExchange");
}

HOSTCANN_API int AccOffloadEntryGather(void)
{
    return refuse("AccOffloadEntryGather");
}
