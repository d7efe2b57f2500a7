#include "backing.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define PAGE ((size_t)4096)
#define ROUND_UP(n, to) (((n) + (to) - 1) / (to) * (to))

struct hc_backing {
    atomic_uint references;
    pid_t owner; /* the process that counts it; a forked child must not give it back */
    int fd;
    size_t file_bytes;
    size_t counted_bytes;
    uint32_t file;
    enum hc_side side;
    int device;
    char process[HC_NAME_LENGTH];
    struct hc_peer *peer;
};

static atomic_uint next_file;

static void file_path(char *path, size_t size, const char *process, uint32_t file)
{
    snprintf(path, size, "%s/processes/%s/mem-%u", hc_process()->root, process, file);
}

static struct hc_device_usage *usage_of(enum hc_side side, int device)
{
    struct hc_usage *usage = hc_process()->usage;
    return side == HC_SIDE_DEVICE ? &usage->device[device] : &usage->host;
}

/* Does the file system below HOSTCANN_ROOT still have room? Writing past its end would be a SIGBUS, not an error. */
static bool host_has_room(size_t bytes)
{
    struct statvfs info;
    if (statvfs(hc_process()->root, &info) != 0 || (uint64_t)info.f_bavail * info.f_bsize >= bytes)
        return true;
    fprintf(stderr, "hostcann: %s has %llu bytes free, %zu are needed\n", hc_process()->root,
            (unsigned long long)info.f_bavail * info.f_bsize, bytes);
    return false;
}

/* Take `bytes` off the device's free HBM, or count a failure. */
static bool reserve_bytes(enum hc_side side, int device, size_t bytes)
{
    int lock = hc_root_lock();
    if (lock < 0)
        return false;
    bool fits = true;
    if (side == HC_SIDE_DEVICE) {
        struct hc_devices *devices = hc_process()->devices;
        uint64_t after = hc_device_bytes_in_use(device) + bytes;
        fits = after <= devices->hbm_bytes;
        if (!fits)
            atomic_fetch_add(&devices->device[device].allocation_failures, 1);
        else if (after > atomic_load(&devices->device[device].peak_bytes))
            atomic_store(&devices->device[device].peak_bytes, after);
    }
    if (fits) {
        atomic_fetch_add(&usage_of(side, device)->bytes, bytes);
        atomic_fetch_add(&usage_of(side, device)->allocations, 1);
    }
    hc_root_unlock(lock);
    return fits;
}

static void return_bytes(enum hc_side side, int device, size_t bytes)
{
    atomic_fetch_sub(&usage_of(side, device)->bytes, bytes);
    atomic_fetch_sub(&usage_of(side, device)->allocations, 1);
}

struct hc_backing *hc_backing_create(enum hc_side side, int device, size_t bytes)
{
    const struct hc_process *process = hc_process();
    struct hc_backing *backing = calloc(1, sizeof *backing);
    if (process == NULL || backing == NULL)
        goto no_memory;
    backing->references = 1;
    backing->owner = getpid();
    backing->counted_bytes = ROUND_UP(bytes, PAGE);
    backing->file_bytes = ROUND_UP(bytes, HC_HUGE_PAGE);
    backing->side = side;
    backing->device = device;
    backing->file = atomic_fetch_add(&next_file, 1);
    memcpy(backing->process, process->name, sizeof backing->process);
    if (!host_has_room(backing->counted_bytes) || !reserve_bytes(side, device, backing->counted_bytes))
        goto no_memory;
    char path[PATH_MAX];
    file_path(path, sizeof path, backing->process, backing->file);
    backing->fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (backing->fd < 0 || ftruncate(backing->fd, (off_t)backing->file_bytes) != 0) {
        fprintf(stderr, "hostcann: cannot make %s of %zu bytes: %s\n", path, backing->file_bytes, strerror(errno));
        if (backing->fd >= 0) {
            close(backing->fd);
            unlink(path);
        }
        return_bytes(side, device, backing->counted_bytes);
        goto no_memory;
    }
    return backing;
no_memory:
    free(backing);
    return NULL;
}

struct hc_backing *hc_backing_import(const struct hc_share *share)
{
    if (share->magic != HC_MAGIC || hc_process() == NULL)
        return NULL;
    struct hc_backing *backing = calloc(1, sizeof *backing);
    if (backing == NULL)
        return NULL;
    backing->references = 1;
    backing->owner = getpid();
    backing->file = share->file;
    backing->file_bytes = share->bytes;
    backing->side = share->side == HC_SIDE_DEVICE ? HC_SIDE_DEVICE : HC_SIDE_HOST;
    backing->device = share->device;
    snprintf(backing->process, sizeof backing->process, "%.*s", HC_NAME_LENGTH - 1, share->process);
    char path[PATH_MAX];
    file_path(path, sizeof path, backing->process, backing->file);
    backing->fd = open(path, O_RDWR | O_CLOEXEC);
    if (backing->fd < 0) {
        fprintf(stderr, "hostcann: cannot import %s: %s\n", path, strerror(errno));
        free(backing);
        return NULL;
    }
    backing->peer = hc_peer_open(backing->process);
    if (backing->peer == NULL) {
        fprintf(stderr, "hostcann: cannot import %s: its owner is gone\n", path);
        close(backing->fd);
        free(backing);
        return NULL;
    }
    return backing;
}

struct hc_backing *hc_backing_retain(struct hc_backing *backing)
{
    atomic_fetch_add(&backing->references, 1);
    return backing;
}

void hc_backing_release(struct hc_backing *backing)
{
    if (atomic_fetch_sub(&backing->references, 1) != 1)
        return;
    close(backing->fd);
    if (backing->peer == NULL && backing->owner == getpid()) {
        char path[PATH_MAX];
        file_path(path, sizeof path, backing->process, backing->file);
        unlink(path);
        return_bytes(backing->side, backing->device, backing->counted_bytes);
    }
    free(backing);
}

void hc_backing_describe(const struct hc_backing *backing, uint64_t offset, struct hc_share *share)
{
    memset(share, 0, sizeof *share);
    share->magic = HC_MAGIC;
    memcpy(share->process, backing->process, sizeof share->process);
    share->file = backing->file;
    share->side = backing->side;
    share->device = backing->device;
    share->offset = offset;
    share->bytes = backing->file_bytes;
}

bool hc_backing_map(const struct hc_backing *backing, void *address, size_t bytes, off_t offset)
{
    if (offset < 0 || (size_t)offset > backing->file_bytes || bytes > backing->file_bytes - (size_t)offset) {
        fprintf(stderr, "hostcann: a mapping of %zu bytes at offset %lld exceeds the %zu bytes of its memory\n", bytes,
                (long long)offset, backing->file_bytes);
        return false;
    }
    return mmap(address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, backing->fd, offset) != MAP_FAILED;
}

size_t hc_backing_bytes(const struct hc_backing *backing)
{
    return backing->file_bytes;
}

enum hc_side hc_backing_side(const struct hc_backing *backing)
{
    return backing->side;
}

int hc_backing_device(const struct hc_backing *backing)
{
    return backing->device;
}

const struct hc_peer *hc_backing_peer(const struct hc_backing *backing)
{
    return backing->peer;
}
