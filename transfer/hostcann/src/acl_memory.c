/* aclrt*: allocation, copies and fills. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "backing.h"
#include "device.h"
#include "errors.h"
#include "hostcann.h"
#include "regions.h"

#define HOST_ALIGNMENT ((size_t)4096)

/* A 2 MiB aligned range of address space without memory; NULL when there is none. */
static void *reserve_aligned(size_t bytes)
{
    size_t reserved = bytes + HC_HUGE_PAGE;
    char *start = mmap(NULL, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED)
        return NULL;
    size_t head = -(uintptr_t)start & (HC_HUGE_PAGE - 1);
    if (head != 0)
        munmap(start, head);
    munmap(start + head + bytes, reserved - head - bytes);
    return start + head;
}

HOSTCANN_API int aclrtMalloc(void **pointer, size_t bytes, int policy)
{
    (void)policy;
    if (pointer == NULL || bytes == 0)
        return ACL_ERROR_BAD_PARAM;
    struct hc_backing *backing = hc_backing_create(HC_SIDE_DEVICE, hc_current_device(), bytes);
    if (backing == NULL)
        return ACL_ERROR_OUT_OF_MEMORY;
    size_t mapped = hc_backing_bytes(backing);
    void *address = reserve_aligned(mapped);
    bool ok = address != NULL && hc_backing_map(backing, address, mapped, 0) &&
              hc_region_add(address, mapped, 0, backing);
    hc_backing_release(backing); /* the region holds it now, or nobody does */
    if (!ok) {
        if (address != NULL)
            munmap(address, mapped);
        return ACL_ERROR_OUT_OF_MEMORY;
    }
    *pointer = address;
    return ACL_OK;
}

HOSTCANN_API int aclrtMallocAlign32(void **pointer, size_t bytes, int policy)
{
    return aclrtMalloc(pointer, bytes, policy);
}

HOSTCANN_API int aclrtFree(void *pointer)
{
    struct hc_region region;
    if (pointer == NULL || !hc_region_remove(pointer, &region))
        return ACL_ERROR_BAD_PARAM;
    munmap(pointer, region.end - region.start);
    return ACL_OK;
}

HOSTCANN_API int aclrtMallocHost(void **pointer, size_t bytes)
{
    if (pointer == NULL || bytes == 0)
        return ACL_ERROR_BAD_PARAM;
    *pointer = aligned_alloc(HOST_ALIGNMENT, (bytes + HOST_ALIGNMENT - 1) / HOST_ALIGNMENT * HOST_ALIGNMENT);
    return *pointer == NULL ? ACL_ERROR_OUT_OF_MEMORY : ACL_OK;
}

HOSTCANN_API int aclrtFreeHost(void *pointer)
{
    free(pointer);
    return ACL_OK;
}

HOSTCANN_API int aclrtGetMemInfo(int attribute, size_t *free_bytes, size_t *total_bytes)
{
    (void)attribute; /* every kind of device memory is the one HBM */
    uint64_t in_use, total;
    int result = hostcann_device_memory(hc_current_device(), &in_use, &total);
    if (result != ACL_OK)
        return result;
    *free_bytes = in_use < total ? total - in_use : 0;
    *total_bytes = total;
    return ACL_OK;
}

HOSTCANN_API int aclrtMemcpy(void *to, size_t capacity, const void *from, size_t bytes, int kind)
{
    (void)kind; /* the addresses tell */
    return bytes > capacity ? ACL_ERROR_BAD_PARAM : hostcann_copy(hc_current_device(), to, from, bytes);
}

HOSTCANN_API int aclrtMemcpyAsync(void *to, size_t capacity, const void *from, size_t bytes, int kind, void *stream)
{
    (void)stream;
    return aclrtMemcpy(to, capacity, from, bytes, kind);
}

HOSTCANN_API int rtMemcpyAsyncWithoutCheckKind(void *to, uint64_t capacity, const void *from, uint64_t bytes, int kind,
                                               void *stream)
{
    return aclrtMemcpyAsync(to, capacity, from, bytes, kind, stream);
}

HOSTCANN_API int aclrtMemcpy2d(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                               size_t height, int kind)
{
    if (width > to_pitch || width > from_pitch)
        return ACL_ERROR_BAD_PARAM;
    for (size_t row = 0; row < height; row++) {
        int result = aclrtMemcpy((char *)to + row * to_pitch, width, (const char *)from + row * from_pitch, width, kind);
        if (result != ACL_OK)
            return result;
    }
    return ACL_OK;
}

HOSTCANN_API int aclrtMemcpy2dAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                    size_t height, int kind, void *stream)
{
    (void)stream;
    return aclrtMemcpy2d(to, to_pitch, from, from_pitch, width, height, kind);
}

HOSTCANN_API int aclrtMemcpyBatch(void **to, size_t *capacity, void **from, size_t *bytes, size_t count,
                                  void *attributes, size_t *attribute_index, size_t attribute_count, size_t *failed)
{
    (void)attributes;
    (void)attribute_index;
    (void)attribute_count;
    size_t fits = 0, copied;
    while (fits < count && bytes[fits] <= capacity[fits])
        fits++;
    int result = hostcann_copy_batch(hc_current_device(), to, (const void *const *)from, bytes, fits, &copied);
    if (result == ACL_OK && fits < count)
        result = ACL_ERROR_BAD_PARAM;
    if (result != ACL_OK && failed != NULL)
        *failed = copied;
    return result;
}

HOSTCANN_API int aclrtMemset(void *to, size_t capacity, int value, size_t bytes)
{
    if (bytes > capacity)
        return ACL_ERROR_BAD_PARAM;
    memset(to, value, bytes);
    return ACL_OK;
}

HOSTCANN_API int aclrtMemsetAsync(void *to, size_t capacity, int value, size_t bytes, void *stream)
{
    (void)stream;
    return aclrtMemset(to, capacity, value, bytes);
}

int hostcann_device_memory(int device, uint64_t *in_use, uint64_t *total)
{
    if (!hc_is_device_id(device))
        return ACL_ERROR_BAD_DEVICE;
    int lock = hc_root_lock();
    if (lock < 0)
        return ACL_ERROR_INTERNAL;
    *in_use = hc_device_bytes_in_use(device);
    hc_root_unlock(lock);
    *total = hc_process()->devices->hbm_bytes;
    return ACL_OK;
}

bool hostcann_is_device(const void *pointer)
{
    struct hc_region region;
    return hc_region_find(pointer, &region);
}
