/*
 * The processes whose memory this process has imported.
 *
 * A mapping outlives its owner, but on hardware a read from a dead process fails; so one thread per peer sleeps on the
 * peer's lock and marks it dead when the lock comes free.
 */
#ifndef HOSTCANN_PEERS_H
#define HOSTCANN_PEERS_H

#include <stdatomic.h>
#include <stdbool.h>

struct hc_peer;

/* The peer of that process name (a folder below HOSTCANN_ROOT/processes); NULL if it is gone. Never freed. */
struct hc_peer *hc_peer_open(const char *name);

bool hc_peer_is_dead(const struct hc_peer *peer);

#endif
