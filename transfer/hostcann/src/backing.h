/*
 * Backing: one allocation, a file of shared memory in its owner's folder, or the import of a peer's.
 *
 * Invariant: a device's bytes in use, summed over live processes, never exceed its HBM size; the check and the change
 * are one step under the root lock. Bytes are counted in whole 4 KiB pages.
 */
#ifndef HOSTCANN_BACKING_H
#define HOSTCANN_BACKING_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "peers.h"
#include "process.h"

#define HC_HUGE_PAGE ((size_t)2 << 20) /* what registration rounds to, and what mappings are aligned to */

enum hc_side { HC_SIDE_HOST = 0, HC_SIDE_DEVICE = 1 };

/* What travels in a 128-byte share handle. */
struct hc_share {
    uint64_t magic;
    char process[HC_NAME_LENGTH];
    uint32_t file;
    uint32_t side;
    int32_t device;
    uint32_t reserved;
    uint64_t offset; /* of the shared range within the file */
    uint64_t bytes;  /* of the whole file */
};

struct hc_backing;

/* A new allocation with one reference. NULL when the device is full or the host has no memory. */
struct hc_backing *hc_backing_create(enum hc_side side, int device, size_t bytes);

/* A peer's allocation, with one reference. NULL when its owner is gone. */
struct hc_backing *hc_backing_import(const struct hc_share *share);

struct hc_backing *hc_backing_retain(struct hc_backing *backing);
/* Drop a reference; the last one gives the memory back. */
void hc_backing_release(struct hc_backing *backing);

void hc_backing_describe(const struct hc_backing *backing, uint64_t offset, struct hc_share *share);

/* Map [offset, offset + bytes) over the reserved range at `address`. */
bool hc_backing_map(const struct hc_backing *backing, void *address, size_t bytes, off_t offset);

size_t hc_backing_bytes(const struct hc_backing *backing); /* length of the file */
enum hc_side hc_backing_side(const struct hc_backing *backing);
int hc_backing_device(const struct hc_backing *backing);
const struct hc_peer *hc_backing_peer(const struct hc_backing *backing); /* NULL when it is our own */

#endif
