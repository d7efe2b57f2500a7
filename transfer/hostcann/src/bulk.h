/* Copying many bytes that the copying processor will not read next, as a DMA engine does. */
#ifndef HOSTCANN_BULK_H
#define HOSTCANN_BULK_H

#include <stddef.h>

/* memmove; large pieces go past the caches where the processor can do that. */
void hc_bulk_copy(void *destination, const void *source, size_t bytes);

/* After copies, before anybody is told of them. */
void hc_bulk_fence(void);

#endif
