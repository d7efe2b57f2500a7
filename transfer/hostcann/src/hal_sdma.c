/*
 * hal*: submission queues of the SDMA engine. An entry is executed when it is sent; a failed one is reported the way
 * the hardware does it, as a completion with an error code, which the submitter polls for.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "errors.h"
#include "hostcann.h"

#define QUEUE_DEPTH 2048u
#define MAX_QUEUES 1024u
#define ENTRY_BYTES 64u
#define ENTRY_SDMA 11
#define QUEUE_TYPE_NORMAL 0
#define QUERY_HEAD 1
#define QUERY_COMPLETION_STATUS 4
#define CODE_PAGE_ERROR 3u /* "transfer page error": the address is gone */

struct queue_input {
    int type;
    uint32_t ts, entry_bytes, completion_bytes, entry_depth, completion_depth, group, flag, cq, sq;
    uint32_t info[5]; /* info[0]: stream id */
    uint32_t reserved[8];
};

struct queue_output {
    uint32_t sq, cq;
    unsigned long long address;
    uint32_t flag;
    uint32_t reserved[5];
};

struct queue_free {
    int type;
    uint32_t ts, sq, cq, flag;
    uint32_t reserved[8];
};

struct task {
    int type;
    uint32_t ts, sq;
    int timeout;
    const uint8_t *entries;
    uint32_t count, position;
    uint32_t reserved[8];
};

struct query {
    int type;
    uint32_t ts, sq, cq;
    int property;
    uint32_t value[8];
};

struct report_request {
    int type;
    uint32_t ts, cq;
    int timeout;
    uint8_t *reports;
    uint32_t capacity, count;
    uint32_t stream, task;
    uint32_t reserved[8];
};

struct report {
    uint16_t stream, task;
    uint32_t code;
    uint8_t error_type, entry_type;
    uint16_t sq, head, flags;
    uint64_t timestamps[2];
};

/* One submission queue. Its user is one stream of one thread; only allocation needs the lock. */
struct queue {
    bool used;
    uint32_t stream;
    atomic_uint head;
    atomic_uint error_code; /* 0: none waits to be reported */
    atomic_uint error_task;
};

static pthread_mutex_t queues_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct queue queues[MAX_QUEUES];
static atomic_uint next_resource = 1;

static struct queue *queue_of(uint32_t sq)
{
    return sq < MAX_QUEUES && queues[sq].used ? &queues[sq] : NULL;
}

HOSTCANN_API int halSqCqAllocate(uint32_t device, const struct queue_input *input, struct queue_output *output)
{
    (void)device;
    memset(output, 0, sizeof *output);
    pthread_mutex_lock(&queues_mutex);
    uint32_t sq = 0;
    while (sq < MAX_QUEUES && queues[sq].used)
        sq++;
    if (sq < MAX_QUEUES) {
        queues[sq].used = true;
        queues[sq].stream = input->type == QUEUE_TYPE_NORMAL ? input->info[0] : UINT32_MAX;
        atomic_store(&queues[sq].head, 0);
        atomic_store(&queues[sq].error_code, 0);
    }
    pthread_mutex_unlock(&queues_mutex);
    output->sq = output->cq = sq;
    return sq < MAX_QUEUES ? DRV_OK : DRV_ERROR_OUT_OF_MEMORY;
}

HOSTCANN_API int halSqCqFree(uint32_t device, const struct queue_free *request)
{
    (void)device;
    pthread_mutex_lock(&queues_mutex);
    struct queue *queue = queue_of(request->sq);
    if (queue != NULL)
        queue->used = false;
    pthread_mutex_unlock(&queues_mutex);
    return queue == NULL ? DRV_ERROR_INVALID_VALUE : DRV_OK;
}

HOSTCANN_API int halResourceIdAlloc(uint32_t device, const void *input, uint32_t *resource)
{
    (void)device;
    (void)input;
    *resource = atomic_fetch_add(&next_resource, 1);
    return DRV_OK;
}

HOSTCANN_API int halResourceIdFree(uint32_t device, const void *input)
{
    (void)device;
    (void)input;
    return DRV_OK;
}

/* Binding a stream to its completion queue: reports are found by stream id here. */
HOSTCANN_API int halResourceConfig(uint32_t device, const void *input, const void *config)
{
    (void)device;
    (void)input;
    (void)config;
    return DRV_OK;
}

/* Execute one 64-byte entry: bits 0-5 type, bytes 6-7 task, 28-31 length, 32-39 source, 40-47 destination. */
static int execute(uint32_t device, struct queue *queue, const uint8_t *entry)
{
    int type = entry[0] & 0x3f;
    uint16_t task;
    uint32_t length;
    uint64_t source, destination;
    memcpy(&task, entry + 6, sizeof task);
    memcpy(&length, entry + 28, sizeof length);
    memcpy(&source, entry + 32, sizeof source);
    memcpy(&destination, entry + 40, sizeof destination);
    if (type != ENTRY_SDMA) {
        fprintf(stderr, "hostcann: queue entries of type %d are not emulated\n", type);
        return DRV_ERROR_INVALID_VALUE;
    }
    if (hostcann_copy((int)device, (void *)(uintptr_t)destination, (const void *)(uintptr_t)source, length) != ACL_OK) {
        atomic_store(&queue->error_task, task);
        atomic_store(&queue->error_code, CODE_PAGE_ERROR);
    }
    atomic_store(&queue->head, (task + 1u) % QUEUE_DEPTH);
    return DRV_OK;
}

/* In the preload library: the wheel need not sleep before it asks for completion. */
__attribute__((weak)) void hostcann_copies_are_done(void);

HOSTCANN_API int halSqTaskSend(uint32_t device, struct task *task)
{
    struct queue *queue = queue_of(task->sq);
    if (queue == NULL)
        return DRV_ERROR_INVALID_VALUE;
    for (uint32_t i = 0; i < task->count; i++) {
        int result = execute(device, queue, task->entries + (size_t)i * ENTRY_BYTES);
        if (result != DRV_OK)
            return result;
    }
    if (hostcann_copies_are_done != NULL)
        hostcann_copies_are_done();
    return DRV_OK;
}

HOSTCANN_API int halSqCqQuery(uint32_t device, struct query *query)
{
    (void)device;
    struct queue *queue = queue_of(query->sq);
    if (queue == NULL)
        return DRV_ERROR_INVALID_VALUE;
    if (query->property == QUERY_HEAD)
        query->value[0] = atomic_load(&queue->head);
    else if (query->property == QUERY_COMPLETION_STATUS)
        query->value[0] = atomic_load(&queue->error_code) != 0;
    else
        return DRV_ERROR_INVALID_VALUE;
    return DRV_OK;
}

HOSTCANN_API int halCqReportRecv(uint32_t device, struct report_request *request)
{
    (void)device;
    request->count = 0;
    for (uint32_t sq = 0; sq < MAX_QUEUES; sq++) {
        struct queue *queue = queue_of(sq);
        if (queue == NULL || queue->stream != request->stream)
            continue;
        uint32_t code = atomic_exchange(&queue->error_code, 0);
        if (code == 0 || request->capacity == 0)
            continue;
        struct report report = {
            .stream = (uint16_t)queue->stream,
            .task = (uint16_t)atomic_load(&queue->error_task),
            .code = code,
            .error_type = 1,
            .entry_type = ENTRY_SDMA,
            .sq = (uint16_t)sq,
            .head = (uint16_t)atomic_load(&queue->head),
        };
        memcpy(request->reports, &report, sizeof report);
        request->count = 1;
        break;
    }
    return DRV_OK;
}
