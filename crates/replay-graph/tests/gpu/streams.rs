//! A stream that is busy, and a device that does not track uses.

#![allow(unsafe_code)]

use candle_core::Device;
use candle_core::cuda_backend::cudarc::driver::{LaunchConfig, PushKernelArg};

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
