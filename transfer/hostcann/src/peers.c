#include "peers.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "process.h"

#define WATCHER_STACK_BYTES (64 * 1024)

struct hc_peer {
    struct hc_peer *next;
    char name[HC_NAME_LENGTH];
    int lock_fd;
    atomic_bool dead;
};

static pthread_mutex_t peers_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct hc_peer *peers;

static void *watch(void *argument)
{
    struct hc_peer *peer = argument;
    while (flock(peer->lock_fd, LOCK_SH) != 0 && errno == EINTR)
        ;
    atomic_store(&peer->dead, true);
    close(peer->lock_fd);
    return NULL;
}

static bool start_watching(struct hc_peer *peer)
{
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, WATCHER_STACK_BYTES);
    sigfillset(&all); /* signals belong to the program's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int result = pthread_create(&thread, &attributes, watch, peer);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return result == 0;
}

static struct hc_peer *open_new(const char *name)
{
    const struct hc_process *process = hc_process();
    struct hc_peer *peer = calloc(1, sizeof *peer);
    if (process == NULL || peer == NULL)
        goto failed;
    snprintf(peer->name, sizeof peer->name, "%s", name);
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/processes/%s/lock", process->root, peer->name);
    peer->lock_fd = open(path, O_RDWR | O_CLOEXEC);
    if (peer->lock_fd < 0)
        goto failed;
    if (!start_watching(peer)) {
        close(peer->lock_fd);
        goto failed;
    }
    return peer;
failed:
    free(peer);
    return NULL;
}

struct hc_peer *hc_peer_open(const char *name)
{
    pthread_mutex_lock(&peers_mutex);
    struct hc_peer *peer = peers;
    while (peer != NULL && strcmp(peer->name, name) != 0)
        peer = peer->next;
    if (peer == NULL && (peer = open_new(name)) != NULL) {
        peer->next = peers;
        peers = peer;
    }
    pthread_mutex_unlock(&peers_mutex);
    return peer;
}

bool hc_peer_is_dead(const struct hc_peer *peer)
{
    return peer != NULL && atomic_load_explicit(&peer->dead, memory_order_relaxed);
}
