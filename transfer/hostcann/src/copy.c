#include "hostcann.h"

#include "bulk.h"
#include "errors.h"
#include "regions.h"

/* The kind that a copy counts as; -1 for host to host, which no device takes part in. */
static int kind_of(const struct hc_region *destination, const struct hc_region *source)
{
    if ((destination != NULL && destination->peer != NULL) || (source != NULL && source->peer != NULL))
        return HOSTCANN_COPY_PEER;
    bool to_device = destination != NULL && destination->side == HC_SIDE_DEVICE;
    bool from_device = source != NULL && source->side == HC_SIDE_DEVICE;
    if (to_device)
        return from_device ? HOSTCANN_COPY_D2D : HOSTCANN_COPY_H2D;
    return from_device ? HOSTCANN_COPY_D2H : -1;
}

static int count_copies(int device, int kind, uint64_t copies, uint64_t bytes)
{
    if (device < 0 || device >= hc_device_count())
        return ACL_ERROR_BAD_DEVICE;
    if (kind < 0 || kind >= HOSTCANN_COPY_KINDS)
        return ACL_ERROR_BAD_PARAM;
    struct hc_device_counters *counters = &hc_process()->devices->device[device];
    atomic_fetch_add_explicit(&counters->copied_bytes[kind], bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&counters->copies[kind], copies, memory_order_relaxed);
    return ACL_OK;
}

int hostcann_count_copy(int device, int kind, uint64_t bytes)
{
    return count_copies(device, kind, 1, bytes);
}

/* A region that was found, for addresses nearby; `start` == `end` when the last address was plain host memory. */
static const struct hc_region *find_again(const void *address, struct hc_region *last)
{
    uintptr_t at = (uintptr_t)address;
    if (at >= last->start && at < last->end)
        return last;
    *last = (struct hc_region){0};
    return hc_region_find(address, last) ? last : NULL;
}

int hostcann_copy_batch(int device, void *const *destinations, const void *const *sources, const size_t *bytes,
                        size_t count, size_t *copied)
{
    struct hc_region to = {0}, from = {0};
    uint64_t copies[HOSTCANN_COPY_KINDS] = {0}, moved[HOSTCANN_COPY_KINDS] = {0};
    int result = ACL_OK;
    size_t i = 0;
    for (; i < count; i++) {
        const struct hc_region *to_region = find_again(destinations[i], &to);
        const struct hc_region *from_region = find_again(sources[i], &from);
        if ((to_region != NULL && hc_peer_is_dead(to.peer)) || (from_region != NULL && hc_peer_is_dead(from.peer))) {
            result = ACL_ERROR_INTERNAL;
            break;
        }
        hc_bulk_copy(destinations[i], sources[i], bytes[i]);
        int kind = kind_of(to_region, from_region);
        if (kind >= 0) {
            copies[kind]++;
            moved[kind] += bytes[i];
        }
    }
    hc_bulk_fence();
    if (copied != NULL)
        *copied = i;
    for (int kind = 0; kind < HOSTCANN_COPY_KINDS; kind++) {
        int counted = copies[kind] > 0 ? count_copies(device, kind, copies[kind], moved[kind]) : ACL_OK;
        if (result == ACL_OK)
            result = counted;
    }
    return result;
}

int hostcann_copy(int device, void *destination, const void *source, size_t bytes)
{
    return hostcann_copy_batch(device, &destination, &source, &bytes, 1, NULL);
}
