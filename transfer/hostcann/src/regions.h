/*
 * The address map of this process: which ranges are emulated device-addressable memory, and what backs them.
 *
 * Invariant: ranges never overlap, so an address belongs to at most one region. Every other address is plain host
 * memory.
 */
#ifndef HOSTCANN_REGIONS_H
#define HOSTCANN_REGIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "backing.h"

/* A snapshot of the region around an address; `side` and `device` are the memory's, not the caller's. */
struct hc_region {
    uintptr_t start;
    uintptr_t end;
    off_t offset; /* of start within the backing */
    enum hc_side side;
    int device;
    const struct hc_peer *peer; /* NULL when this process owns the memory */
};

/* Enter a mapped range; the map takes a reference to the backing. */
bool hc_region_add(void *address, size_t bytes, off_t offset, struct hc_backing *backing);

/* Remove the region that starts at `address` and drop its reference. False if there is none. */
bool hc_region_remove(void *address, struct hc_region *removed);

bool hc_region_find(const void *address, struct hc_region *found);

/* The same, with a new reference to the backing in *backing. */
bool hc_region_retain(const void *address, struct hc_region *found, struct hc_backing **backing);

#endif
