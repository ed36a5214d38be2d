//! Planning into buffers that have held a plan as large allocates nothing. In a program of its own,
//! because the allocator that counts is the program's.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::num::NonZeroU32;

use replay_core::{
    CaptureSizes, GraphMode, LayerSchedule, Planner, PlannerConfig, ReplayLayers, ReplayPolicy,
    Request, RowCount, StepPlan, Window,
};

struct Counting;

thread_local! {
    /// Of this thread alone: other tests, and the test harness, allocate at the same time.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

fn count_one() {
    ALLOCATIONS.with(|n| n.set(n.get() + 1));
}

// SAFETY: every call is passed on to `System` as it came; counting touches a constant-initialised
// thread-local without a destructor, which neither allocates nor unwinds.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count_one();
        // SAFETY: the caller's promise about `layout` is the one that `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count_one();
        // SAFETY: as for `alloc`; `block` came from `System`, like every block of this allocator.
        unsafe { System.realloc(block, layout, size) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: `block` came from `System` with this `layout`.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations(run: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.with(Cell::get);
    run();
    ALLOCATIONS.with(Cell::get) - before
}

fn planner(policy: ReplayPolicy) -> Planner {
    let layers = ReplayLayers::from_schedule(&LayerSchedule {
        num_layers: 40,
        kv_sources: &[20],
        compress_ratios: &[],
        engram_layers: &[],
    });
    let window = Window::new(128).expect("a window");
    Planner::new(PlannerConfig {
        window,
        layers: layers.expect("a model that can replay"),
        policy,
        sampled_rows: NonZeroU32::MIN,
    })
    .with_capture_sizes(CaptureSizes::ladder(window, 8192).expect("sizes"))
}

/// 256 requests with 65,536 rows, planned again and again, eagerly and in a graph; and with them the
/// gathers of what belongs to the rows.
#[test]
fn planning_into_reused_buffers_allocates_nothing() {
    let requests = vec![Request::prefill(1024, 768..1024); 256];
    let mode = GraphMode::Piecewise {
        padded_rows: RowCount::new(65_536),
    };
    let slots: Vec<i64> = (0..65_536).collect();
    for policy in ReplayPolicy::ALL {
        let planner = planner(policy);
        let mut plan = StepPlan::new();
        let (mut gather, mut gathered, mut offsets) = (vec![], vec![], vec![]);
        let mut step = || {
            planner.plan_into(&requests, &mut plan).expect("a plan");
            planner
                .plan_into(&requests[..100], &mut plan)
                .expect("a plan");
            planner
                .plan_step(mode, &requests, &mut plan)
                .expect("a plan");
            for layer in plan.layers() {
                let rows = layer.running;
                layer.gather_into(&mut gather);
                rows.gather_slots(&slots, rows.n_rows(), &mut gathered)
                    .expect("they fit");
                rows.pad_query_start_loc(300, &mut offsets)
                    .expect("they fit");
            }
        };
        assert!(allocations(&mut step) > 0, "the counter does not count");
        assert_eq!(allocations(&mut step), 0, "{policy}");
    }
}
