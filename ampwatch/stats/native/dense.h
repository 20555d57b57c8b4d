/* What a kernel is told of tensors, asked through the table of functions that DLPack 1 gives to C (torch from 2.10 on
 * has it): tens of nanoseconds a tensor, where each question from Python takes a hundred. Included by pass.c; called
 * with the interpreter's lock held, as it handles Python's objects. It looks into none of them itself. */

enum { DL_FLOAT = 2, DL_BFLOAT = 4 }; /* kinds of number */
enum { LOOK_CLOSER = 0x80 };          /* beside a format: see ampwatch_describe */

struct dl_tensor {
    void *data;
    int32_t device_kind, device;
    int32_t ndim;
    uint8_t kind, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};

typedef int describe_tensor(void *object, struct dl_tensor *tensor); /* -1 with an error of Python's */
typedef void *item_of(void *list, ptrdiff_t i);                      /* PyList_GetItem: borrowed */

static int format_of(const struct dl_tensor *tensor)
{
    if (tensor->lanes != 1)
        return -1;
    if (tensor->kind == DL_BFLOAT)
        return tensor->bits == 16 ? BFLOAT16 : -1;
    if (tensor->kind != DL_FLOAT)
        return -1;
    return tensor->bits == 16 ? FLOAT16 : tensor->bits == 32 ? FLOAT32 : tensor->bits == 64 ? FLOAT64 : -1;
}

/* Its elements; `in_order` tells whether they follow one another in memory, row after row. */
static int64_t elements_of(const struct dl_tensor *tensor, int *in_order)
{
    int64_t elements = 1;
    *in_order = 1;
    for (int32_t i = tensor->ndim - 1; i >= 0; i--) {
        if (tensor->shape[i] != 1 && tensor->strides && tensor->strides[i] != elements)
            *in_order = 0;
        elements *= tensor->shape[i];
    }
    return elements;
}

/* Addresses, numbers of elements and formats (enum format) of the n tensors of a list, and the device of them all, its
 * kind in the upper half.
 * A format has LOOK_CLOSER where this cannot tell whether the elements fill a stretch of memory and stand there as
 * they are read: they are in another order, or there is one only, which may be negated when it is read.
 * Answers 1; 0 if one is not to be taken as it lies; -1 with an error of Python's. */
EXPORT int ampwatch_describe(void *list, int64_t n, item_of *item, describe_tensor *describe, int64_t *addresses,
                             int64_t *numels, uint8_t *formats, int64_t *device)
{
    for (int64_t i = 0; i < n; i++) {
        struct dl_tensor tensor;
        void *object = item(list, (ptrdiff_t)i);
        if (!object || describe(object, &tensor))
            return -1;
        int in_order, format = format_of(&tensor);
        int64_t place = (int64_t)tensor.device_kind << 32 | (uint32_t)tensor.device;
        numels[i] = elements_of(&tensor, &in_order);
        addresses[i] = (int64_t)((uintptr_t)tensor.data + tensor.byte_offset);
        if (format < 0 || (i && place != *device) || (numels[i] && !tensor.data))
            return 0;
        *device = place;
        formats[i] = (uint8_t)(in_order && numels[i] != 1 ? format : format | LOOK_CLOSER);
    }
    return 1;
}
