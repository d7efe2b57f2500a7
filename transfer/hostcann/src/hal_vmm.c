/*
 * hal*: virtual memory management. A handle is a range of a backing; exporting one writes its name and offset into the
 * share handle, importing it maps the same file, so both processes see the same bytes.
 */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "backing.h"
#include "device.h"
#include "errors.h"
#include "hostcann.h"
#include "regions.h"

#define SHARE_HANDLE_BYTES 128
#define MEM_SIDE_DEVICE 1u
#define MEMORY_HOST 0x1u
#define MEMORY_DEVICE 0x10u /* locked, addressable by the device */

_Static_assert(sizeof(struct hc_share) <= SHARE_HANDLE_BYTES, "a share must fit into the share handle");

struct vmm_handle {
    struct hc_backing *backing;
    uint64_t offset;
};

struct vmm_property {
    uint32_t side;
    uint32_t device;
    uint32_t module;
    uint32_t page_type;
    uint32_t memory_type;
    uint64_t reserved;
};

struct memory_attribute {
    uint32_t memory_type;
    uint32_t reserved[2];
    uint32_t device;
    uint32_t page_bytes;
};

struct share_attribute {
    uint32_t enabled;
    uint32_t reserved[8];
};

struct reservation {
    struct reservation *next;
    void *address;
    size_t bytes;
};

static pthread_mutex_t reservations_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct reservation *reservations;

static int new_handle(struct hc_backing *backing, uint64_t offset, struct vmm_handle **handle)
{
    struct vmm_handle *made = malloc(sizeof *made);
    if (made == NULL) {
        hc_backing_release(backing);
        return DRV_ERROR_OUT_OF_MEMORY;
    }
    made->backing = backing;
    made->offset = offset;
    *handle = made;
    return DRV_OK;
}

HOSTCANN_API int drvMemGetAttribute(uint64_t address, struct memory_attribute *attribute)
{
    struct hc_region region;
    memset(attribute, 0, sizeof *attribute);
    if (!hc_region_find((const void *)(uintptr_t)address, &region)) {
        attribute->memory_type = MEMORY_HOST;
        attribute->page_bytes = 4096;
        return DRV_OK;
    }
    attribute->memory_type = MEMORY_DEVICE;
    attribute->device = (uint32_t)region.device;
    attribute->page_bytes = (uint32_t)HC_HUGE_PAGE;
    return DRV_OK;
}

HOSTCANN_API int halMemGetAllocationGranularity(const struct vmm_property *property, int option, size_t *granularity)
{
    (void)property;
    (void)option;
    *granularity = HC_HUGE_PAGE;
    return DRV_OK;
}

HOSTCANN_API int halMemCreate(struct vmm_handle **handle, size_t bytes, const struct vmm_property *property,
                              uint64_t flag)
{
    (void)flag;
    if (handle == NULL || property == NULL || bytes == 0)
        return DRV_ERROR_INVALID_VALUE;
    bool on_device = property->side == MEM_SIDE_DEVICE;
    if (on_device && !hc_is_device_id((int)property->device))
        return DRV_ERROR_NO_DEVICE;
    struct hc_backing *backing = on_device ? hc_backing_create(HC_SIDE_DEVICE, (int)property->device, bytes)
                                           : hc_backing_create(HC_SIDE_HOST, hc_current_device(), bytes);
    return backing == NULL ? DRV_ERROR_OUT_OF_MEMORY : new_handle(backing, 0, handle);
}

HOSTCANN_API int halMemRetainAllocationHandle(struct vmm_handle **handle, void *pointer)
{
    struct hc_region region;
    struct hc_backing *backing;
    if (!hc_region_retain(pointer, &region, &backing))
        return DRV_ERROR_INVALID_VALUE;
    return new_handle(backing, (uint64_t)region.offset + ((uintptr_t)pointer - region.start), handle);
}

HOSTCANN_API int halMemRelease(struct vmm_handle *handle)
{
    if (handle == NULL)
        return DRV_ERROR_INVALID_VALUE;
    hc_backing_release(handle->backing);
    free(handle);
    return DRV_OK;
}

HOSTCANN_API int halMemExportToShareableHandleV2(struct vmm_handle *handle, int type, uint64_t flags, uint8_t *share)
{
    (void)type;
    (void)flags;
    if (handle == NULL || share == NULL)
        return DRV_ERROR_INVALID_VALUE;
    memset(share, 0, SHARE_HANDLE_BYTES);
    struct hc_share description;
    hc_backing_describe(handle->backing, handle->offset, &description);
    memcpy(share, &description, sizeof description);
    return DRV_OK;
}

HOSTCANN_API int halMemTransShareableHandle(int type, const uint8_t *share, uint32_t *server, uint64_t *shareable)
{
    (void)type;
    struct hc_share description;
    memcpy(&description, share, sizeof description);
    *server = 0;
    *shareable = description.file;
    return DRV_OK;
}

/* Who may import is not restricted: the files' permissions keep other users out. */
HOSTCANN_API int halMemShareHandleSetAttribute(uint64_t shareable, int type, struct share_attribute attribute)
{
    (void)shareable;
    (void)type;
    (void)attribute;
    return DRV_OK;
}

HOSTCANN_API int halMemImportFromShareableHandleV2(int type, const uint8_t *share, uint32_t device,
                                                   struct vmm_handle **handle)
{
    (void)type;
    (void)device;
    struct hc_share description;
    memcpy(&description, share, sizeof description);
    struct hc_backing *backing = hc_backing_import(&description);
    return backing == NULL ? DRV_ERROR_INVALID_VALUE : new_handle(backing, description.offset, handle);
}

/* Take the reservation that starts at `address` out of the list; NULL if there is none. */
static struct reservation *take_reservation(const void *address)
{
    pthread_mutex_lock(&reservations_mutex);
    struct reservation **link = &reservations;
    while (*link != NULL && (*link)->address != address)
        link = &(*link)->next;
    struct reservation *found = *link;
    if (found != NULL)
        *link = found->next;
    pthread_mutex_unlock(&reservations_mutex);
    return found;
}

static int free_reservation(void *address)
{
    struct reservation *found = take_reservation(address);
    if (found == NULL)
        return DRV_ERROR_INVALID_VALUE;
    munmap(found->address, found->bytes);
    free(found);
    return DRV_OK;
}

/*
 * A restarted peer is given the addresses of its predecessor. The wheel unmaps that one's memory but keeps the address
 * range, or has not noticed the death yet: free the range when nothing alive is mapped there.
 */
static bool drop_stale_reservation(void *address)
{
    struct hc_region region;
    if (hc_region_find(address, &region)) {
        if (!hc_peer_is_dead(region.peer) || !hc_region_remove(address, &region))
            return false;
    }
    return free_reservation(address) == DRV_OK;
}

HOSTCANN_API int halMemAddressReserve(void **address, size_t bytes, size_t alignment, void *hint, uint64_t flag)
{
    (void)alignment; /* the wheels ask for exact addresses */
    (void)flag;
    struct reservation *reservation = malloc(sizeof *reservation);
    if (reservation == NULL)
        return DRV_ERROR_OUT_OF_MEMORY;
    int where = hint == NULL ? 0 : MAP_FIXED_NOREPLACE;
    void *got = mmap(hint, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | where, -1, 0);
    if (got == MAP_FAILED && errno == EEXIST && drop_stale_reservation(hint))
        got = mmap(hint, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | where, -1, 0);
    if (got == MAP_FAILED) {
        fprintf(stderr, "hostcann: cannot reserve %zu bytes at %p: %s\n", bytes, hint, strerror(errno));
        free(reservation);
        return DRV_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_lock(&reservations_mutex);
    *reservation = (struct reservation){.next = reservations, .address = got, .bytes = bytes};
    reservations = reservation;
    pthread_mutex_unlock(&reservations_mutex);
    *address = got;
    return DRV_OK;
}

HOSTCANN_API int halMemAddressFree(void *address)
{
    return free_reservation(address);
}

HOSTCANN_API int halMemMap(void *address, size_t bytes, size_t offset, struct vmm_handle *handle, uint64_t flag)
{
    (void)flag;
    if (handle == NULL)
        return DRV_ERROR_INVALID_VALUE;
    off_t start = (off_t)(handle->offset + offset);
    if (!hc_backing_map(handle->backing, address, bytes, start))
        return DRV_ERROR_INVALID_VALUE;
    return hc_region_add(address, bytes, start, handle->backing) ? DRV_OK : DRV_ERROR_INNER;
}

HOSTCANN_API int halMemUnmap(void *address)
{
    struct hc_region region;
    if (!hc_region_remove(address, &region))
        return DRV_ERROR_INVALID_VALUE;
    /* Nothing is mapped over it: the address range around it is still the caller's. */
    void *got = mmap(address, region.end - region.start, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return got == MAP_FAILED ? DRV_ERROR_INNER : DRV_OK;
}

HOSTCANN_API int halMemSetAccess(void *address, size_t bytes, void *descriptions, size_t count)
{
    (void)bytes;
    (void)descriptions;
    (void)count;
    return hostcann_is_device(address) ? DRV_OK : DRV_ERROR_INVALID_VALUE;
}
