/* The device that the calling thread works on, as aclrtSetDevice left it. */
#ifndef HOSTCANN_DEVICE_H
#define HOSTCANN_DEVICE_H

#include <stdbool.h>

/* The thread's device; before its first aclrtSetDevice, the one the process set last, else 0. */
int hc_current_device(void);

bool hc_is_device_id(int device);

#endif
