//! Counts what a pass queues, by standing between the program and the driver.
//!
//! The driver is linked dynamically, so a function of this program with the name of a driver call
//! takes its place, counts, and calls the driver's own.

#![allow(unsafe_code)]

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_uchar, c_uint, c_void};
use std::sync::OnceLock;

/// What was queued.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) kernels: u32,
    /// Copies within the device.
    pub(crate) copies: u32,
    pub(crate) fills: u32,
    /// Every stream that something was queued on, in order of first use.
    pub(crate) streams: Vec<usize>,
}

thread_local! {
    /// What this thread has queued; `None` while nobody counts.
    static COUNTS: RefCell<Option<Counts>> = const { RefCell::new(None) };
}

/// What this thread queues while `body` runs, and what that gives.
pub(crate) fn counted<T>(body: impl FnOnce() -> T) -> (Counts, T) {
    COUNTS.set(Some(Counts::default()));
    let value = body();
    (COUNTS.take().expect("nobody else counts"), value)
}

fn count(stream: *mut c_void, add: impl FnOnce(&mut Counts)) {
    // The thread may be ending; nothing is counted then.
    let _ = COUNTS.try_with(|counts| {
        if let Some(counts) = &mut *counts.borrow_mut() {
            add(counts);
            if !counts.streams.contains(&stream.addr()) {
                counts.streams.push(stream.addr());
            }
        }
    });
}

unsafe extern "C" {
    fn dlsym(handle: *mut c_void, symbol: *const c_char) -> *mut c_void;
}

/// Looks a symbol up in what was loaded after this program: the driver.
fn next(symbol: &CStr) -> *mut c_void {
    /// glibc's `RTLD_NEXT`.
    const NEXT: *mut c_void = std::ptr::without_provenance_mut(usize::MAX);
    // SAFETY: the name ends in a zero, and the handle is one that `dlsym` defines.
    let address = unsafe { dlsym(NEXT, symbol.as_ptr()) };
    assert!(!address.is_null(), "the driver has no {symbol:?}");
    address
}

type LaunchKernel = unsafe extern "C" fn(
    *mut c_void,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    *mut c_void,
    *mut *mut c_void,
    *mut *mut c_void,
) -> c_uint;

/// # Safety
///
/// As the driver's.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchKernel(
    function: *mut c_void,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared_bytes: c_uint,
    stream: *mut c_void,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> c_uint {
    static REAL: OnceLock<LaunchKernel> = OnceLock::new();
    count(stream, |counts| counts.kernels += 1);
    let real = REAL.get_or_init(|| {
        // SAFETY: the driver's function has this signature.
        unsafe { std::mem::transmute::<*mut c_void, LaunchKernel>(next(c"cuLaunchKernel")) }
    });
    // SAFETY: the caller keeps the driver's contract, and the arguments are passed on as they are.
    unsafe {
        real(
            function,
            grid_x,
            grid_y,
            grid_z,
            block_x,
            block_y,
            block_z,
            shared_bytes,
            stream,
            params,
            extra,
        )
    }
}

type Copy = unsafe extern "C" fn(u64, u64, usize, *mut c_void) -> c_uint;

/// # Safety
///
/// As the driver's.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoDAsync_v2(
    to: u64,
    from: u64,
    bytes: usize,
    stream: *mut c_void,
) -> c_uint {
    static REAL: OnceLock<Copy> = OnceLock::new();
    count(stream, |counts| counts.copies += 1);
    let real = REAL.get_or_init(|| {
        // SAFETY: the driver's function has this signature.
        unsafe { std::mem::transmute::<*mut c_void, Copy>(next(c"cuMemcpyDtoDAsync_v2")) }
    });
    // SAFETY: the caller keeps the driver's contract, and the arguments are passed on as they are.
    unsafe { real(to, from, bytes, stream) }
}

type Fill = unsafe extern "C" fn(u64, c_uchar, usize, *mut c_void) -> c_uint;

/// # Safety
///
/// As the driver's.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemsetD8Async(
    to: u64,
    value: c_uchar,
    bytes: usize,
    stream: *mut c_void,
) -> c_uint {
    static REAL: OnceLock<Fill> = OnceLock::new();
    count(stream, |counts| counts.fills += 1);
    let real = REAL.get_or_init(|| {
        // SAFETY: the driver's function has this signature.
        unsafe { std::mem::transmute::<*mut c_void, Fill>(next(c"cuMemsetD8Async")) }
    });
    // SAFETY: the caller keeps the driver's contract, and the arguments are passed on as they are.
    unsafe { real(to, value, bytes, stream) }
}
