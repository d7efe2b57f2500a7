#include "process.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define DEFAULT_HBM_BYTES (1ull << 30)

static pthread_mutex_t init_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct hc_process self;
static int lock_fd = -1;
static atomic_bool registered;
static bool refused; /* registration failed: the reason has been printed, do not try again */

static bool complain(const char *what, const char *path)
{
    fprintf(stderr, "hostcann: cannot %s %s: %s\n", what, path, strerror(errno));
    return false;
}

/* A positive integer from the environment; `fallback` when unset, 0 when it is not one. */
static uint64_t environment_number(const char *name, uint64_t fallback)
{
    const char *text = getenv(name);
    if (text == NULL || *text == '\0')
        return fallback;
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    return (errno != 0 || *end != '\0') ? 0 : value;
}

static bool make_folder(const char *path)
{
    return mkdir(path, 0700) == 0 || errno == EEXIST || complain("create folder", path);
}

/* Map `bytes` of a file, made and extended with zeros where it is shorter. */
static void *map_file(const char *path, size_t bytes)
{
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) {
        complain("open", path);
        return NULL;
    }
    struct stat info;
    void *mapped = MAP_FAILED;
    if (fstat(fd, &info) == 0 && ((size_t)info.st_size >= bytes || ftruncate(fd, (off_t)bytes) == 0))
        mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED)
        complain("map", path);
    close(fd);
    return mapped == MAP_FAILED ? NULL : mapped;
}

/* Open the counters all processes share, or check that they describe the machine this process was told about. */
static bool open_devices(uint64_t count, uint64_t hbm_bytes)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/devices", self.root);
    self.devices = map_file(path, sizeof *self.devices);
    if (self.devices == NULL)
        return false;
    if (self.devices->magic == 0) {
        self.devices->count = count;
        self.devices->hbm_bytes = hbm_bytes;
        self.devices->magic = HC_MAGIC;
    }
    if (self.devices->magic == HC_MAGIC && self.devices->count == count && self.devices->hbm_bytes == hbm_bytes)
        return true;
    fprintf(stderr,
            "hostcann: %s was made for %llu devices of %llu bytes, this process is set to %llu of %llu: "
            "use another HOSTCANN_ROOT or sweep that one\n",
            self.root, (unsigned long long)self.devices->count, (unsigned long long)self.devices->hbm_bytes,
            (unsigned long long)count, (unsigned long long)hbm_bytes);
    return false;
}

/* Make this process's folder and take its lock. The caller holds the root lock, so no sweep sees it half made. */
static bool open_folder(void)
{
    char path[PATH_MAX + 16];
    snprintf(path, sizeof path, "%s/processes", self.root);
    if (!make_folder(path))
        return false;
    snprintf(self.folder, sizeof self.folder, "%s/processes/p-XXXXXX", self.root);
    if (mkdtemp(self.folder) == NULL)
        return complain("create folder", self.folder);
    snprintf(self.name, sizeof self.name, "%s", strrchr(self.folder, '/') + 1);
    snprintf(path, sizeof path, "%s/lock", self.folder);
    lock_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (lock_fd < 0 || flock(lock_fd, LOCK_EX | LOCK_NB) != 0)
        return complain("lock", path);
    snprintf(path, sizeof path, "%s/usage", self.folder);
    self.usage = map_file(path, sizeof *self.usage);
    return self.usage != NULL;
}

static bool register_process(void)
{
    const char *root = getenv("HOSTCANN_ROOT");
    const char *chip = getenv("HOSTCANN_CHIP");
    uint64_t count = environment_number("HOSTCANN_DEVICES", 1);
    uint64_t hbm_bytes = environment_number("HOSTCANN_HBM_BYTES", DEFAULT_HBM_BYTES);
    if (count == 0 || count > HC_MAX_DEVICES || hbm_bytes == 0) {
        fprintf(stderr, "hostcann: HOSTCANN_DEVICES must be 1..%d and HOSTCANN_HBM_BYTES a positive number of bytes\n",
                HC_MAX_DEVICES);
        return false;
    }
    if (root != NULL && *root != '\0')
        snprintf(self.root, sizeof self.root, "%s", root);
    else
        snprintf(self.root, sizeof self.root, "/dev/shm/hostcann-%u", (unsigned)getuid());
    snprintf(self.chip, sizeof self.chip, "%s", chip != NULL && *chip != '\0' ? chip : "Ascend910_9382");
    if (!make_folder(self.root))
        return false;
    int fd = hc_root_lock();
    if (fd < 0)
        return false;
    bool ok = open_devices(count, hbm_bytes) && open_folder();
    hc_root_unlock(fd);
    return ok;
}

/* A forked child is another process: the parent's folder, lock and allocations are not its own. */
static void forget_after_fork(void)
{
    if (lock_fd >= 0)
        close(lock_fd);
    lock_fd = -1;
    pthread_mutex_init(&init_mutex, NULL);
    atomic_store(&registered, false);
    refused = false;
}

const struct hc_process *hc_process(void)
{
    if (atomic_load_explicit(&registered, memory_order_acquire))
        return &self;
    pthread_mutex_lock(&init_mutex);
    if (!atomic_load(&registered) && !refused) {
        if (register_process())
            atomic_store_explicit(&registered, true, memory_order_release);
        else
            refused = true;
    }
    pthread_mutex_unlock(&init_mutex);
    return refused ? NULL : &self;
}

int hc_device_count(void)
{
    const struct hc_process *process = hc_process();
    return process == NULL ? 0 : (int)process->devices->count;
}

int hc_root_lock(void)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/lock", self.root);
    /* A fresh description per call, so that it also excludes the other threads of this process. */
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) {
        complain("open", path);
        return -1;
    }
    int result;
    while ((result = flock(fd, LOCK_EX)) != 0 && errno == EINTR)
        ;
    if (result != 0) {
        complain("lock", path);
        close(fd);
        return -1;
    }
    return fd;
}

void hc_root_unlock(int fd)
{
    close(fd);
}

static bool is_alive(int processes_fd, const char *name)
{
    char path[NAME_MAX + 8];
    snprintf(path, sizeof path, "%s/lock", name);
    int fd = openat(processes_fd, path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return false;
    bool alive = flock(fd, LOCK_SH | LOCK_NB) != 0;
    close(fd);
    return alive;
}

uint64_t hc_device_bytes_in_use(int device)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/processes", self.root);
    DIR *folder = opendir(path);
    if (folder == NULL)
        return 0;
    uint64_t total = 0;
    struct dirent *entry;
    while ((entry = readdir(folder)) != NULL) {
        if (strncmp(entry->d_name, "p-", 2) != 0 || !is_alive(dirfd(folder), entry->d_name))
            continue;
        char usage_path[NAME_MAX + 8];
        snprintf(usage_path, sizeof usage_path, "%s/usage", entry->d_name);
        int fd = openat(dirfd(folder), usage_path, O_RDONLY | O_CLOEXEC);
        uint64_t bytes = 0;
        if (fd >= 0 && pread(fd, &bytes, sizeof bytes, (off_t)(sizeof(struct hc_device_usage) * (size_t)device)) ==
                           (ssize_t)sizeof bytes)
            total += bytes;
        if (fd >= 0)
            close(fd);
    }
    closedir(folder);
    return total;
}

__attribute__((constructor)) static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, forget_after_fork);
}

/* A process that ends normally leaves nothing behind; one that is killed leaves its folder to the next sweep. */
__attribute__((destructor)) void hostcann_leave(void)
{
    if (lock_fd < 0)
        return;
    DIR *folder = opendir(self.folder);
    if (folder == NULL)
        return;
    struct dirent *entry;
    while ((entry = readdir(folder)) != NULL)
        unlinkat(dirfd(folder), entry->d_name, 0);
    closedir(folder);
    rmdir(self.folder);
    close(lock_fd);
    lock_fd = -1;
}
