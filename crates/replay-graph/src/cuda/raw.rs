//! Driver calls that cudarc does not wrap, and those that it leaves unsafe.

#![allow(unsafe_code)]

use std::collections::{HashMap, HashSet};
use std::mem::MaybeUninit;
use std::ptr;

use candle_core::cuda_backend::cudarc::driver::{
    CudaContext, CudaEvent, CudaGraph, CudaStream, DriverError, result, sys,
};

use crate::NodeCounts;

/// Switches event tracking of slices that are made from now on, and of all uses.
pub(super) fn set_event_tracking(context: &CudaContext, on: bool) {
    if on {
        // SAFETY: slices made while tracking was off carry no events. They are used on the one
        // stream of their device, where work runs in the order in which it is queued.
        unsafe { context.enable_event_tracking() }
    } else {
        // SAFETY: a device queues all its work on one stream, which orders uses, frees and
        // allocations without events. Captures are claimed by one thread at a time.
        unsafe { context.disable_event_tracking() }
    }
}

/// Ends whatever is being captured and throws it away. Does nothing when nothing is.
pub(super) fn discard_capture(stream: &CudaStream) {
    let cu_stream = stream.cu_stream();
    // SAFETY: the stream is alive, as it is borrowed.
    let status = unsafe { result::stream::is_capturing(cu_stream) };
    if matches!(
        status,
        Ok(sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    ) {
        return;
    }
    // SAFETY: the stream is alive. The call ends a capture even where it reports an error, which is
    // what it does for one that was invalidated.
    let graph = unsafe { result::stream::end_capture(cu_stream) };
    if let Ok(graph) = graph
        && !graph.is_null()
    {
        // SAFETY: the graph has just been made and nothing else has its handle. It has not been
        // instantiated, so none of its memory is mapped. That it may fail is no matter here.
        let _ = unsafe { result::graph::destroy(graph) };
    }
}

/// Records an event on a stream. While the stream is being captured that becomes a node of the graph,
/// so that each launch records it.
pub(super) fn record(event: &CudaEvent, stream: &CudaStream) -> Result<(), DriverError> {
    const EXTERNAL: u32 = sys::CUevent_record_flags_enum::CU_EVENT_RECORD_EXTERNAL as u32;
    // SAFETY: the stream is alive, as it is borrowed.
    let capturing = unsafe { result::stream::is_capturing(stream.cu_stream()) }?;
    // The flag is refused where nothing is captured.
    let flags = match capturing {
        sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => 0,
        _ => EXTERNAL,
    };
    // SAFETY: both handles are alive, as they are borrowed. A graph that records the event must not
    // outlive it: the driver keeps the event until then.
    unsafe { sys::cuEventRecordWithFlags(event.cu_event(), stream.cu_stream(), flags) }.result()
}

/// Counts the nodes of a graph by kind.
pub(super) fn node_counts(graph: &CudaGraph) -> Result<NodeCounts, DriverError> {
    let mut counts = NodeCounts::default();
    let mut working = HashSet::new();
    let nodes = nodes(graph)?;
    for &node in &nodes {
        let mut kind = MaybeUninit::<sys::CUgraphNodeType>::uninit();
        // SAFETY: the node belongs to a graph that is alive; the driver writes the kind.
        unsafe { sys::cuGraphNodeGetType(node, kind.as_mut_ptr()) }.result()?;
        // SAFETY: the call has written it. Read as the number it is: a driver newer than the
        // bindings may know of kinds that the enum does not.
        let kind = unsafe { kind.as_ptr().cast::<u32>().read() };
        if !matches!(kind, MEM_ALLOC | MEM_FREE) {
            working.insert(node);
        }
        *match kind {
            KERNEL => &mut counts.kernels,
            MEMCPY if touches_host(node)? => &mut counts.host_copies,
            MEMCPY => &mut counts.copies,
            MEMSET => &mut counts.fills,
            MEM_ALLOC => &mut counts.allocations,
            MEM_FREE => &mut counts.frees,
            _ => &mut counts.others,
        } += 1;
    }
    counts.longest = longest(&nodes, &edges(graph)?, &working);
    Ok(counts)
}

/// The most `working` nodes that lie on one way along the edges.
fn longest(
    nodes: &[sys::CUgraphNode],
    edges: &[(sys::CUgraphNode, sys::CUgraphNode)],
    working: &HashSet<sys::CUgraphNode>,
) -> u32 {
    let mut after: HashMap<_, Vec<_>> = HashMap::new();
    let mut waits: HashMap<_, usize> = HashMap::new();
    for &(from, to) in edges {
        after.entry(from).or_default().push(to);
        *waits.entry(to).or_default() += 1;
    }
    let mut ready: Vec<_> = nodes.iter().filter(|n| !waits.contains_key(*n)).collect();
    let mut lengths: HashMap<_, u32> = HashMap::new();
    let mut longest = 0;
    while let Some(node) = ready.pop() {
        let length = lengths.get(node).copied().unwrap_or(0) + u32::from(working.contains(node));
        longest = longest.max(length);
        for next in after.get(node).into_iter().flatten() {
            let before = lengths.entry(*next).or_default();
            *before = length.max(*before);
            if let Some(left) = waits.get_mut(next) {
                *left -= 1;
                if *left == 0 {
                    ready.push(next);
                }
            }
        }
    }
    longest
}

/// Pairs of nodes, the second of which waits for the first.
fn edges(graph: &CudaGraph) -> Result<Vec<(sys::CUgraphNode, sys::CUgraphNode)>, DriverError> {
    let (handle, null) = (graph.cu_graph(), ptr::null_mut());
    let mut n = 0;
    // SAFETY: the graph is alive, as it is borrowed; without lists only the count is written.
    unsafe { sys::cuGraphGetEdges_v2(handle, null, null, ptr::null_mut(), &raw mut n) }.result()?;
    let (mut from, mut to) = (vec![ptr::null_mut(); n], vec![ptr::null_mut(); n]);
    let plain = sys::CUgraphEdgeData {
        from_port: 0,
        to_port: 0,
        type_: 0,
        reserved: [0; 5],
    };
    let mut data = vec![plain; n];
    if n > 0 {
        let lists = (from.as_mut_ptr(), to.as_mut_ptr(), data.as_mut_ptr());
        // SAFETY: each list has room for the `n` edges it is said to have room for.
        unsafe { sys::cuGraphGetEdges_v2(handle, lists.0, lists.1, lists.2, &raw mut n) }
            .result()?;
    }
    Ok(from.into_iter().zip(to).take(n).collect())
}

const KERNEL: u32 = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL as u32;
const MEMCPY: u32 = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMCPY as u32;
const MEMSET: u32 = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMSET as u32;
const MEM_ALLOC: u32 = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEM_ALLOC as u32;
const MEM_FREE: u32 = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEM_FREE as u32;

fn nodes(graph: &CudaGraph) -> Result<Vec<sys::CUgraphNode>, DriverError> {
    let mut n = 0;
    // SAFETY: the graph is alive, as it is borrowed; without a list only the count is written.
    unsafe { sys::cuGraphGetNodes(graph.cu_graph(), ptr::null_mut(), &raw mut n) }.result()?;
    let mut nodes = vec![ptr::null_mut(); n];
    if n > 0 {
        // SAFETY: the list has room for the `n` nodes it is said to have room for.
        unsafe { sys::cuGraphGetNodes(graph.cu_graph(), nodes.as_mut_ptr(), &raw mut n) }
            .result()?;
    }
    nodes.truncate(n);
    Ok(nodes)
}

/// Whether a copy reads or writes host memory.
fn touches_host(node: sys::CUgraphNode) -> Result<bool, DriverError> {
    const HOST: u32 = sys::CUmemorytype::CU_MEMORYTYPE_HOST as u32;
    let mut copy = MaybeUninit::<sys::CUDA_MEMCPY3D>::zeroed();
    // SAFETY: the node is a copy of a graph that is alive; the driver writes its parameters.
    unsafe { sys::cuGraphMemcpyNodeGetParams(node, copy.as_mut_ptr()) }.result()?;
    let copy = copy.as_ptr();
    // SAFETY: both fields lie in the parameters, were zeroed and then written. They are read as
    // numbers, as a value that the driver does not set is none that the enum has.
    let kinds = unsafe {
        [
            (&raw const (*copy).srcMemoryType).cast::<u32>().read(),
            (&raw const (*copy).dstMemoryType).cast::<u32>().read(),
        ]
    };
    Ok(kinds.contains(&HOST))
}

/// Bytes of device memory that are reserved for what graphs allocate.
pub(super) fn graph_memory(context: &CudaContext) -> Result<u64, DriverError> {
    let mut bytes = 0u64;
    // SAFETY: the device is that of a context that is alive, and the attribute is a 64-bit number.
    unsafe {
        sys::cuDeviceGetGraphMemAttribute(
            context.cu_device(),
            sys::CUgraphMem_attribute::CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT,
            (&raw mut bytes).cast(),
        )
    }
    .result()?;
    Ok(bytes)
}

/// Returns graph memory that is not in use to the device.
pub(super) fn trim_graph_memory(context: &CudaContext) -> Result<(), DriverError> {
    // SAFETY: the device is that of a context that is alive. Memory in use is left alone.
    unsafe { sys::cuDeviceGraphMemTrim(context.cu_device()) }.result()
}
