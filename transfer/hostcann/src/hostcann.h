/*
 * hostcann: an Ascend driver and runtime emulated on the host.
 *
 * The functions below are our own additions to the emulated Ascend API; everything else that libhostcann.so exports
 * carries the name and the signature of the Ascend symbol it stands for.
 */
#ifndef HOSTCANN_H
#define HOSTCANN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define HOSTCANN_API __attribute__((visibility("default")))

/* What a copy moved between; the order is that of the counters in struct hostcann_device_counters. */
enum hostcann_copy_kind {
    HOSTCANN_COPY_H2D = 0,
    HOSTCANN_COPY_D2H = 1,
    HOSTCANN_COPY_D2D = 2,
    HOSTCANN_COPY_PEER = 3, /* the source or the destination belongs to another process */
    HOSTCANN_COPY_KINDS = 4,
};

/*
 * Copy as a DMA engine of `device` would, and count it there: the one place where copies are made, by aclrtMemcpy and
 * its kin, by SDMA queue entries and by the offload kernels. Either range may be host, device or imported memory.
 * 0, or an ACL error code: touching memory of a dead process fails, as it does on hardware.
 */
HOSTCANN_API int hostcann_copy(int device, void *destination, const void *source, size_t bytes);

/* `count` such copies, one after the other up to the first that fails; *copied, if given, is how many were made. */
HOSTCANN_API int hostcann_copy_batch(int device, void *const *destinations, const void *const *sources,
                                     const size_t *bytes, size_t count, size_t *copied);

/* Is ptr memory that a device can address: device memory, or pinned host memory made by halMemCreate? */
HOSTCANN_API bool hostcann_is_device(const void *ptr);

/* Add `bytes` to the copy counters of `device`, for copies made by CPU operators. 0, or an ACL error code. */
HOSTCANN_API int hostcann_count_copy(int device, int kind, uint64_t bytes);

/* HBM of `device` in use by all live processes, and its size, in bytes. 0, or an ACL error code. */
HOSTCANN_API int hostcann_device_memory(int device, uint64_t *in_use, uint64_t *total);

/*
 * Give up this process's folder, as its normal end does: for a process that is about to end by _exit. Its memory stays
 * mapped, but no peer can find it any more.
 */
HOSTCANN_API void hostcann_leave(void);

#endif
