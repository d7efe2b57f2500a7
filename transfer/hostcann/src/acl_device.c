/* aclrt*: devices, streams and what the chip is. Work is done by the caller, so a stream is always idle. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"
#include "errors.h"
#include "hostcann.h"
#include "process.h"

#define NO_DEVICE (-1)

struct stream {
    int device;
    int id;
};

static _Thread_local int thread_device = NO_DEVICE;
static atomic_int process_device;
static atomic_int next_stream = 1;

int hc_current_device(void)
{
    return thread_device != NO_DEVICE ? thread_device : atomic_load(&process_device);
}

bool hc_is_device_id(int device)
{
    return device >= 0 && device < hc_device_count();
}

HOSTCANN_API int aclInit(const char *config_path)
{
    (void)config_path;
    return hc_process() == NULL ? ACL_ERROR_INTERNAL : ACL_OK;
}

HOSTCANN_API int aclFinalize(void)
{
    return ACL_OK;
}

HOSTCANN_API int aclrtGetDeviceCount(uint32_t *count)
{
    *count = (uint32_t)hc_device_count();
    return ACL_OK;
}

HOSTCANN_API int aclrtSetDevice(int device)
{
    if (!hc_is_device_id(device))
        return ACL_ERROR_BAD_DEVICE;
    thread_device = device;
    atomic_store(&process_device, device);
    return ACL_OK;
}

HOSTCANN_API int aclrtGetDevice(int *device)
{
    *device = hc_current_device();
    return ACL_OK;
}

HOSTCANN_API int aclrtResetDevice(int device)
{
    return hc_is_device_id(device) ? ACL_OK : ACL_ERROR_BAD_DEVICE;
}

HOSTCANN_API const char *aclrtGetSocName(void)
{
    const struct hc_process *process = hc_process();
    return process == NULL ? NULL : process->chip;
}

HOSTCANN_API const char *aclGetRecentErrMsg(void)
{
    return "see hostcann's messages on stderr";
}

HOSTCANN_API int aclrtGetPhyDevIdByLogicDevId(int logical, int *physical)
{
    if (!hc_is_device_id(logical))
        return ACL_ERROR_BAD_DEVICE;
    *physical = logical;
    return ACL_OK;
}

HOSTCANN_API int aclrtDeviceCanAccessPeer(int *can_access, int device, int peer)
{
    if (!hc_is_device_id(device) || !hc_is_device_id(peer))
        return ACL_ERROR_BAD_DEVICE;
    *can_access = 1;
    return ACL_OK;
}

HOSTCANN_API int aclrtDeviceEnablePeerAccess(int peer, uint32_t flags)
{
    (void)flags;
    return hc_is_device_id(peer) ? ACL_OK : ACL_ERROR_BAD_DEVICE;
}

HOSTCANN_API int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flags)
{
    (void)priority;
    (void)flags;
    struct stream *made = malloc(sizeof *made);
    if (made == NULL)
        return ACL_ERROR_OUT_OF_MEMORY;
    made->device = hc_current_device();
    made->id = atomic_fetch_add(&next_stream, 1);
    *stream = made;
    return ACL_OK;
}

HOSTCANN_API int aclrtCreateStream(void **stream)
{
    return aclrtCreateStreamWithConfig(stream, 0, 0);
}

HOSTCANN_API int aclrtDestroyStream(void *stream)
{
    free(stream);
    return ACL_OK;
}

HOSTCANN_API int aclrtSynchronizeStream(void *stream)
{
    (void)stream;
    return ACL_OK;
}

HOSTCANN_API int aclrtStreamAbort(void *stream)
{
    (void)stream;
    return ACL_OK;
}

HOSTCANN_API int aclrtStreamGetId(void *stream, int *id)
{
    *id = stream == NULL ? 0 : ((struct stream *)stream)->id;
    return ACL_OK;
}

HOSTCANN_API int aclrtSetStreamAttribute(void *stream, int attribute, void *value)
{
    (void)stream;
    (void)attribute;
    (void)value;
    return ACL_OK;
}
