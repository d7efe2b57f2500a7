/* rt* and dcmi*: the few calls of the runtime below ACL, and of device management, that the wheels make themselves. */
#include <unistd.h>

#include "device.h"
#include "errors.h"
#include "hostcann.h"

#define P2P_LINK_OPEN 1

HOSTCANN_API int rtGetLogicDevIdByUserDevId(int user, int *logical)
{
    if (!hc_is_device_id(user))
        return ACL_ERROR_BAD_DEVICE;
    *logical = user;
    return ACL_OK;
}

HOSTCANN_API int rtDeviceGetBareTgid(uint32_t *pid)
{
    *pid = (uint32_t)getpid();
    return ACL_OK;
}

/* sdid, server id and super pod id: all devices of one host share them. */
HOSTCANN_API int rtGetDeviceInfo(uint32_t device, int module, int info, int64_t *value)
{
    (void)module;
    (void)info;
    if (!hc_is_device_id((int)device))
        return ACL_ERROR_BAD_DEVICE;
    *value = 0;
    return ACL_OK;
}

HOSTCANN_API int rtEnableP2P(uint32_t device, uint32_t peer, uint32_t flags)
{
    (void)flags;
    return hc_is_device_id((int)device) && hc_is_device_id((int)peer) ? ACL_OK : ACL_ERROR_BAD_DEVICE;
}

HOSTCANN_API int rtDisableP2P(uint32_t device, uint32_t peer)
{
    return rtEnableP2P(device, peer, 0);
}

HOSTCANN_API int rtGetP2PStatus(uint32_t device, uint32_t peer, uint32_t *status)
{
    *status = P2P_LINK_OPEN;
    return rtEnableP2P(device, peer, 0);
}

/* Opens the device management interface; what it could be asked for is not emulated. */
HOSTCANN_API int dcmiv2_init(void)
{
    return ACL_OK;
}
