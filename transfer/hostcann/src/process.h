/*
 * This process as the emulated driver sees it: its folder, its lock, the shared counters.
 *
 * Layout below HOSTCANN_ROOT (the Python side in __init__.py reads it too; change both together):
 *   lock                    flock'ed exclusively for registration and for every change of allocated memory
 *   devices                 struct hc_devices: sizes and the counters that outlive a process
 *   processes/p-XXXXXX/     one per process
 *       lock                flock'ed exclusively as long as the process lives; a free lock means a dead owner
 *       usage               struct hc_usage: what this process holds now
 *       mem-N               one file per allocation
 */
#ifndef HOSTCANN_PROCESS_H
#define HOSTCANN_PROCESS_H

#include <limits.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "hostcann.h"

#define HC_MAX_DEVICES 64
#define HC_NAME_LENGTH 16
#define HC_MAGIC 0x314e4e4143545348ull /* "HSTCANN1" */

struct hc_device_counters {
    _Atomic uint64_t peak_bytes;
    _Atomic uint64_t allocation_failures;
    _Atomic uint64_t copied_bytes[HOSTCANN_COPY_KINDS];
    _Atomic uint64_t copies[HOSTCANN_COPY_KINDS];
    uint64_t reserved[6]; /* two cache lines per device */
};

struct hc_devices {
    uint64_t magic;
    uint64_t count;
    uint64_t hbm_bytes;
    uint64_t reserved[13];
    struct hc_device_counters device[HC_MAX_DEVICES];
};

struct hc_device_usage {
    _Atomic uint64_t bytes;
    _Atomic uint64_t allocations;
};

struct hc_usage {
    struct hc_device_usage device[HC_MAX_DEVICES];
    struct hc_device_usage host; /* pinned host memory from halMemCreate */
};

struct hc_process {
    char root[PATH_MAX - 64];
    char folder[PATH_MAX];
    char name[HC_NAME_LENGTH]; /* last part of folder */
    char chip[32];
    struct hc_devices *devices;
    struct hc_usage *usage;
};

/* This process, registered at the first call; NULL, with the reason on stderr, when it cannot be. */
const struct hc_process *hc_process(void);

/* Number of emulated devices; 0 when this process cannot register. */
int hc_device_count(void);

/* Take and release the lock over all allocations of all processes. -1 when it cannot be taken. */
int hc_root_lock(void);
void hc_root_unlock(int fd);

/* HBM of `device` in use by all live processes, in bytes. The caller holds the root lock. */
uint64_t hc_device_bytes_in_use(int device);

#endif
