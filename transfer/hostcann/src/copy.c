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

int hostcann_count_copy(int device, int kind, uint64_t bytes)
{
    if (device < 0 || device >= hc_device_count())
        return ACL_ERROR_BAD_DEVICE;
    if (kind < 0 || kind >= HOSTCANN_COPY_KINDS)
        return ACL_ERROR_BAD_PARAM;
    struct hc_device_counters *counters = &hc_process()->devices->device[device];
    atomic_fetch_add_explicit(&counters->copied_bytes[kind], bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&counters->copies[kind], 1, memory_order_relaxed);
    return ACL_OK;
}

int hostcann_copy(int device, void *destination, const void *source, size_t bytes)
{
    struct hc_region to, from;
    const struct hc_region *to_region = hc_region_find(destination, &to) ? &to : NULL;
    const struct hc_region *from_region = hc_region_find(source, &from) ? &from : NULL;
    if ((to_region != NULL && hc_peer_is_dead(to.peer)) || (from_region != NULL && hc_peer_is_dead(from.peer)))
        return ACL_ERROR_INTERNAL;
    hc_bulk_copy(destination, source, bytes);
    int kind = kind_of(to_region, from_region);
    return kind < 0 ? ACL_OK : hostcann_count_copy(device, kind, bytes);
}
