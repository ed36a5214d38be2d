//! A stream that is busy, memory that a test fills itself, and a device that does not track uses.

#![allow(unsafe_code)]

use candle_core::Device;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, LaunchConfig, PushKernelArg};

use crate::gpu::Gpu;

/// One thread that watches the clock for so many nanoseconds.
const PTX: &str = "
.version 7.0
.target sm_70
.address_size 64

.visible .entry spin(.param .u64 nanoseconds)
{
    .reg .pred %more;
    .reg .b64 %limit, %start, %now, %spent;
    ld.param.u64 %limit, [nanoseconds];
    mov.u64 %start, %globaltimer;
again:
    mov.u64 %now, %globaltimer;
    sub.u64 %spent, %now, %start;
    setp.lt.u64 %more, %spent, %limit;
    @%more bra again;
    ret;
}
";

/// Queues a kernel on the context's default stream that runs for so many milliseconds.
pub(crate) fn spin_on_default_stream(gpu: &Gpu, milliseconds: u64) {
    let device = gpu.as_cuda_device().unwrap();
    let spin = device.get_or_load_custom_func("spin", "spin", PTX).unwrap();
    let stream = gpu.stream().context().default_stream();
    let nanoseconds = milliseconds * 1_000_000;
    let mut launch = stream.launch_builder(&spin);
    launch.arg(&nanoseconds);
    let one_thread = LaunchConfig {
        grid_dim: (1, 1, 1),
        block_dim: (1, 1, 1),
        shared_mem_bytes: 0,
    };
    // SAFETY: the kernel takes one 64-bit number and touches no memory.
    unsafe { launch.launch(one_thread) }.unwrap();
}

/// One block that writes a value to so many words.
const FILL: &str = "
.version 7.0
.target sm_70
.address_size 64

.visible .entry fill(.param .u64 words, .param .u32 count, .param .u32 value)
{
    .reg .pred %done;
    .reg .b32 %i, %count, %value, %step;
    .reg .b64 %words, %offset, %word;
    ld.param.u64 %words, [words];
    ld.param.u32 %count, [count];
    ld.param.u32 %value, [value];
    cvta.to.global.u64 %words, %words;
    mov.u32 %step, %ntid.x;
    mov.u32 %i, %tid.x;
again:
    setp.ge.u32 %done, %i, %count;
    @%done bra end;
    mul.wide.u32 %offset, %i, 4;
    add.u64 %word, %words, %offset;
    st.global.u32 [%word], %value;
    add.u32 %i, %i, %step;
    bra again;
end:
    ret;
}
";

/// Memory that the device's stream allocates now, with a value in every word.
pub(crate) fn filled(gpu: &Gpu, words: u32, value: u32) -> CudaSlice<u32> {
    let fill = gpu.as_cuda_device().unwrap();
    let fill = fill.get_or_load_custom_func("fill", "fill", FILL).unwrap();
    let stream = gpu.stream();
    // SAFETY: every word is written before anything reads it.
    let mut memory = unsafe { stream.alloc::<u32>(words as usize) }.unwrap();
    let mut launch = stream.launch_builder(&fill);
    launch.arg(&mut memory).arg(&words).arg(&value);
    let one_block = LaunchConfig {
        grid_dim: (1, 1, 1),
        block_dim: (256, 1, 1),
        shared_mem_bytes: 0,
    };
    // SAFETY: the kernel takes an address and two 32-bit numbers, and writes the words it is given.
    unsafe { launch.launch(one_block) }.unwrap();
    memory
}

/// Switches event tracking on or off, as a program may before its first tensor.
pub(crate) fn set_event_tracking(device: &Device, on: bool) {
    let device = device.as_cuda_device().unwrap();
    if on {
        let stream = device.cuda_stream();
        // SAFETY: the tests use each device on its one stream.
        unsafe { stream.context().enable_event_tracking() }
    } else {
        // SAFETY: as above.
        unsafe { device.disable_event_tracking() }
    }
}
