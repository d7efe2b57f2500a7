/*
 * Symbols that torch_npu's libraries are linked against, so that `import torch_npu` succeeds and its operators' schemas
 * are there. Running operators is not emulated: what makes their arguments gives none.
 */
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>

#include "hostcann.h"

#define LOG_ERROR 3 /* aclLogLevel: debug, info, warning, error */

HOSTCANN_API void aclAppLog(int level, const char *function, const char *file, uint32_t line, const char *format, ...)
{
    if (level < LOG_ERROR)
        return;
    fprintf(stderr, "%s:%u %s: ", file, line, function);
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
}

static void *refuse(const char *symbol)
{
    fprintf(stderr, "hostcann: %s is not emulated\n", symbol);
    return NULL;
}

HOSTCANN_API void *aclCreateDataBuffer(void *data, size_t bytes)
{
    (void)data;
    (void)bytes;
    return refuse("aclCreateDataBuffer");
}

HOSTCANN_API void *aclCreateTensorDesc(int type, int dimensions, const int64_t *sizes, int format)
{
    (void)type;
    (void)dimensions;
    (void)sizes;
    (void)format;
    return refuse("aclCreateTensorDesc");
}

HOSTCANN_API void *aclopCreateAttr(void)
{
    return refuse("aclopCreateAttr");
}
