#include "regions.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct entry {
    struct hc_region region;
    struct hc_backing *backing;
};

static pthread_rwlock_t map_lock = PTHREAD_RWLOCK_INITIALIZER;
static struct entry *entries; /* sorted by start */
static size_t entry_count;
static size_t entry_capacity;

/* Index of the first entry whose end lies above the address. */
static size_t lower_bound(uintptr_t address)
{
    size_t low = 0, high = entry_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (entries[middle].region.end > address)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

static struct entry *entry_at(uintptr_t address)
{
    size_t index = lower_bound(address);
    return index < entry_count && entries[index].region.start <= address ? &entries[index] : NULL;
}

static bool grow(void)
{
    if (entry_count < entry_capacity)
        return true;
    size_t capacity = entry_capacity == 0 ? 64 : entry_capacity * 2;
    struct entry *grown = realloc(entries, capacity * sizeof *grown);
    if (grown == NULL)
        return false;
    entries = grown;
    entry_capacity = capacity;
    return true;
}

bool hc_region_add(void *address, size_t bytes, off_t offset, struct hc_backing *backing)
{
    uintptr_t start = (uintptr_t)address;
    pthread_rwlock_wrlock(&map_lock);
    size_t index = lower_bound(start);
    bool room = grow() && (index == entry_count || entries[index].region.start >= start + bytes);
    if (room) {
        memmove(&entries[index + 1], &entries[index], (entry_count - index) * sizeof *entries);
        entries[index] = (struct entry){
            .region = {start, start + bytes, offset, hc_backing_side(backing), hc_backing_device(backing),
                       hc_backing_peer(backing)},
            .backing = hc_backing_retain(backing),
        };
        entry_count++;
    }
    pthread_rwlock_unlock(&map_lock);
    return room;
}

bool hc_region_remove(void *address, struct hc_region *removed)
{
    pthread_rwlock_wrlock(&map_lock);
    struct entry *entry = entry_at((uintptr_t)address);
    if (entry == NULL || entry->region.start != (uintptr_t)address) {
        pthread_rwlock_unlock(&map_lock);
        return false;
    }
    *removed = entry->region;
    struct hc_backing *backing = entry->backing;
    size_t index = (size_t)(entry - entries);
    entry_count--;
    memmove(entry, entry + 1, (entry_count - index) * sizeof *entries);
    pthread_rwlock_unlock(&map_lock);
    hc_backing_release(backing);
    return true;
}

bool hc_region_find(const void *address, struct hc_region *found)
{
    pthread_rwlock_rdlock(&map_lock);
    const struct entry *entry = entry_at((uintptr_t)address);
    if (entry != NULL)
        *found = entry->region;
    pthread_rwlock_unlock(&map_lock);
    return entry != NULL;
}

bool hc_region_retain(const void *address, struct hc_region *found, struct hc_backing **backing)
{
    pthread_rwlock_rdlock(&map_lock);
    struct entry *entry = entry_at((uintptr_t)address);
    if (entry != NULL) {
        *found = entry->region;
        *backing = hc_backing_retain(entry->backing);
    }
    pthread_rwlock_unlock(&map_lock);
    return entry != NULL;
}
