//! Counts what a pass queues, lists what graphs consist of, and gives captures memory that no graph
//! owns, by standing between the program and the driver.
//!
//! The driver is linked dynamically, so a function of this program with the name of a driver call
//! takes its place, does its part, and calls the driver's own.

#![allow(unsafe_code)]

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ffi::{CStr, c_char, c_uchar, c_uint, c_void};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use candle_core::cuda_backend::cudarc::cublas::sys as blas;
use candle_core::cuda_backend::cudarc::driver::sys;

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

/// Whether captures get plain memory. At first they do if `REPLAY_GPU_PLAIN_MEMORY` is set.
static PLAIN: OnceLock<AtomicBool> = OnceLock::new();

/// Where plain memory is. It is never freed: some graph may read it at any time.
static KEPT: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());

/// Whether there is any: a bench must not pay for a look at each free.
static ANY_KEPT: AtomicBool = AtomicBool::new(false);

fn plain() -> &'static AtomicBool {
    PLAIN.get_or_init(|| AtomicBool::new(std::env::var_os("REPLAY_GPU_PLAIN_MEMORY").is_some()))
}

/// Whether what is allocated while a stream is captured is plain device memory instead of the
/// graph's: an allocation of its own, never reused, whose bounds a sanitizer knows.
pub(crate) fn is_plain_memory() -> bool {
    plain().load(Ordering::Relaxed)
}

/// From now on. cuBLAS allocates too: devices made from now on bring memory for it.
#[allow(dead_code, reason = "the bench of launches measures both")]
pub(crate) fn set_plain_memory(on: bool) {
    plain().store(on, Ordering::Relaxed);
}

fn kept() -> std::sync::MutexGuard<'static, BTreeSet<u64>> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_captured(stream: *mut c_void) -> bool {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the caller is about to use the stream, and the driver writes the status.
    let asked = unsafe { sys::cuStreamIsCapturing(stream.cast(), &raw mut status) };
    asked == sys::CUresult::CUDA_SUCCESS
        && status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE
}

/// Allocates past whatever is being captured.
fn allocate(at: *mut u64, bytes: usize) -> c_uint {
    let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the driver swaps the thread's mode with the one given; the second call puts it back.
    // The address is written where the caller wants it, as in the call that this one replaces.
    unsafe {
        sys::cuThreadExchangeStreamCaptureMode(&raw mut mode);
        let status = sys::cuMemAlloc_v2(at, bytes);
        sys::cuThreadExchangeStreamCaptureMode(&raw mut mode);
        if status == sys::CUresult::CUDA_SUCCESS {
            kept().insert(*at);
            ANY_KEPT.store(true, Ordering::Relaxed);
        }
        status as c_uint
    }
}

type AllocAsync = unsafe extern "C" fn(*mut u64, usize, *mut c_void) -> c_uint;

/// # Safety
///
/// As the driver's.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocAsync(at: *mut u64, bytes: usize, stream: *mut c_void) -> c_uint {
    static REAL: OnceLock<AllocAsync> = OnceLock::new();
    if is_plain_memory() && is_captured(stream) {
        return allocate(at, bytes);
    }
    let real = REAL.get_or_init(|| {
        // SAFETY: the driver's function has this signature.
        unsafe { std::mem::transmute::<*mut c_void, AllocAsync>(next(c"cuMemAllocAsync")) }
    });
    // SAFETY: the caller keeps the driver's contract, and the arguments are passed on as they are.
    unsafe { real(at, bytes, stream) }
}

type FreeAsync = unsafe extern "C" fn(u64, *mut c_void) -> c_uint;

/// # Safety
///
/// As the driver's.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemFreeAsync(at: u64, stream: *mut c_void) -> c_uint {
    static REAL: OnceLock<FreeAsync> = OnceLock::new();
    if ANY_KEPT.load(Ordering::Relaxed) && kept().contains(&at) {
        return 0;
    }
    let real = REAL.get_or_init(|| {
        // SAFETY: the driver's function has this signature.
        unsafe { std::mem::transmute::<*mut c_void, FreeAsync>(next(c"cuMemFreeAsync")) }
    });
    // SAFETY: the caller keeps the driver's contract, and the arguments are passed on as they are.
    unsafe { real(at, stream) }
}

type SetStream = unsafe extern "C" fn(blas::cublasHandle_t, *mut c_void) -> c_uint;

/// # Safety
///
/// As cuBLAS's.
#[unsafe(no_mangle)]
unsafe extern "C" fn cublasSetStream_v2(
    handle: blas::cublasHandle_t,
    stream: *mut c_void,
) -> c_uint {
    /// What cuBLAS takes on a Hopper GPU when it allocates for itself.
    const WORKSPACE: usize = 32 << 20;
    static REAL: OnceLock<SetStream> = OnceLock::new();
    let real = REAL.get_or_init(|| {
        // SAFETY: the library's function has this signature.
        unsafe { std::mem::transmute::<*mut c_void, SetStream>(next(c"cublasSetStream_v2")) }
    });
    // SAFETY: the caller keeps the library's contract, and the arguments are passed on as they are.
    let status = unsafe { real(handle, stream) };
    let mut at = 0u64;
    if status != 0 || !is_plain_memory() || allocate(&raw mut at, WORKSPACE) != 0 {
        return status;
    }
    let at = std::ptr::with_exposed_provenance_mut(at as usize);
    // SAFETY: the memory is of that size, is never freed, and is used on the handle's one stream.
    unsafe { blas::cublasSetWorkspace_v2(handle, at, WORKSPACE) as c_uint }
}

type Instantiate = unsafe extern "C" fn(*mut *mut c_void, sys::CUgraph, u64) -> c_uint;

/// # Safety
///
/// As the driver's.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGraphInstantiateWithFlags(
    exec: *mut *mut c_void,
    graph: sys::CUgraph,
    flags: u64,
) -> c_uint {
    static REAL: OnceLock<Instantiate> = OnceLock::new();
    let real = REAL.get_or_init(|| {
        let real = next(c"cuGraphInstantiateWithFlags");
        // SAFETY: the driver's function has this signature.
        unsafe { std::mem::transmute::<*mut c_void, Instantiate>(real) }
    });
    if std::env::var_os("REPLAY_GPU_LIST_GRAPHS").is_some() {
        // SAFETY: the graph is the one to be instantiated.
        unsafe { list(graph) };
    }
    // SAFETY: the caller keeps the driver's contract, and the arguments are passed on as they are.
    unsafe { real(exec, graph, flags) }
}

/// Prints a graph's nodes in the order in which they were made, with the memory of each: what to
/// compare a sanitizer's addresses with.
///
/// # Safety
///
/// The graph must be alive.
unsafe fn list(graph: sys::CUgraph) {
    use sys::CUgraphNodeType as Kind;
    let mut n = 0;
    // SAFETY: without a list only the count is written; after that the list has room for so many.
    // Each node is asked for what its kind has, and the driver writes it.
    unsafe {
        sys::cuGraphGetNodes(graph, std::ptr::null_mut(), &raw mut n);
        let mut nodes = vec![std::ptr::null_mut(); n];
        sys::cuGraphGetNodes(graph, nodes.as_mut_ptr(), &raw mut n);
        println!("graph of {n} nodes");
        for node in nodes {
            let mut kind = Kind::CU_GRAPH_NODE_TYPE_EMPTY;
            sys::cuGraphNodeGetType(node, &raw mut kind);
            match kind {
                Kind::CU_GRAPH_NODE_TYPE_MEM_ALLOC => {
                    let mut memory = MaybeUninit::<sys::CUDA_MEM_ALLOC_NODE_PARAMS>::zeroed();
                    sys::cuGraphMemAllocNodeGetParams(node, memory.as_mut_ptr());
                    let memory = memory.as_ptr();
                    let (at, bytes) = ((*memory).dptr, (*memory).bytesize);
                    println!("  alloc {at:#x} .. {:#x}, {bytes} bytes", at + bytes as u64);
                }
                Kind::CU_GRAPH_NODE_TYPE_MEM_FREE => {
                    let mut at = 0;
                    sys::cuGraphMemFreeNodeGetParams(node, &raw mut at);
                    println!("  free  {at:#x}");
                }
                other => println!("  {other:?}"),
            }
        }
    }
}
