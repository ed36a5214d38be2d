//! What a cache captures, in which order, and what it refuses.

mod common;

use common::{Tape, TapeCapture};
use replay_core::{CaptureSizes, GraphMode, RowCount, Window};
use replay_graph::{CacheConfig, CaptureMode, Error, GraphCache, Result};

type Cache<X = ()> = GraphCache<u32, (), X, TapeCapture>;

const PIECEWISE: CaptureMode = CaptureMode::Piecewise;

fn sizes(sizes: &[u32]) -> CaptureSizes {
    CaptureSizes::new(sizes, 8192).unwrap()
}

fn cache(list: &[u32], config: CacheConfig) -> Cache {
    Cache::new(sizes(list), config)
}

/// A graph captured before a larger one would have to grow the memory that both use.
#[test]
fn the_largest_is_captured_first() {
    let tape = Tape::default();
    tape.segments_take(1000);
    let mut cache = Cache::<bool>::new(sizes(&[8, 32, 16]), CacheConfig::default());
    let mut lines = Vec::new();
    let kinds = [(PIECEWISE, false), (CaptureMode::Full, true)];
    let report = cache
        .capture_all(
            &tape,
            &kinds,
            &mut (),
            |descriptor, _| Ok(descriptor.rows.get()),
            |progress| lines.push(progress.to_string()),
        )
        .unwrap();
    assert_eq!((report.captured, report.already, cache.len()), (6, 0, 6));
    assert_eq!(report.memory.bytes(), 6000);
    assert_eq!(cache.memory(), report.memory);
    insta::assert_snapshot!(lines.join("\n"), @r"
    1/6: piecewise graph of 32 rows (false), 1000 bytes
    2/6: full graph of 32 rows (true), 1000 bytes
    3/6: piecewise graph of 16 rows (false), 1000 bytes
    4/6: full graph of 16 rows (true), 1000 bytes
    5/6: piecewise graph of 8 rows (false), 1000 bytes
    6/6: full graph of 8 rows (true), 1000 bytes
    ");
}

/// A second pass finds everything there.
#[test]
fn a_second_pass_captures_nothing() {
    let tape = Tape::default();
    tape.segments_take(1000);
    let mut cache = cache(&[8, 16], CacheConfig::default());
    let mut pass = || {
        let kinds = [(PIECEWISE, ())];
        cache
            .capture_all(&tape, &kinds, &mut (), |d, _| Ok(d.rows.get()), |_| ())
            .unwrap()
    };
    assert_eq!(pass().captured, 2);
    tape.read();
    let second = pass();
    assert_eq!((second.captured, second.already), (0, 2));
    assert_eq!(second.memory.bytes(), 0);
    assert_eq!(tape.read(), "");
}

/// Rows are rounded up to a captured size; above the largest there is no graph.
#[test]
fn batches_go_to_the_smallest_graph_that_holds_them() {
    let tape = Tape::default();
    let mut cache = cache(&[8, 16, 32], CacheConfig::default());
    let kinds = [(PIECEWISE, ())];
    cache
        .capture_all(&tape, &kinds, &mut (), |d, _| Ok(d.rows.get()), |_| ())
        .unwrap();
    for (rows, expected) in [
        (1, Some(8)),
        (8, Some(8)),
        (9, Some(16)),
        (31, Some(32)),
        (32, Some(32)),
        (33, None),
    ] {
        let graph = cache.get(RowCount::new(rows), PIECEWISE, ());
        assert_eq!(graph.map(|graph| *graph.output()), expected, "{rows} rows");
    }
    // Another mode is another graph.
    assert!(cache.get(RowCount::new(8), CaptureMode::Full, ()).is_none());
}

/// A graph is captured when it is first needed, and not again.
#[test]
fn graphs_are_captured_when_needed() {
    let tape = Tape::default();
    let mut cache = cache(&[8, 16], CacheConfig::default());
    let mut captured = 0;
    for rows in [3, 5, 16, 8, 17] {
        let key = (RowCount::new(rows), PIECEWISE, ());
        let graph = cache
            .get_or_capture(&tape, key, &mut (), |descriptor, scope| {
                captured += u32::from(!scope.is_warm_up());
                Ok(descriptor.rows.get())
            })
            .unwrap();
        assert_eq!(graph.is_some(), rows <= 16);
    }
    assert_eq!((captured, cache.len()), (2, 2));
}

/// What changes a launch beside its rows must not share a graph.
#[test]
fn variants_have_graphs_of_their_own() {
    let tape = Tape::default();
    let mut cache = Cache::<&str>::new(sizes(&[8]), CacheConfig::default());
    for variant in ["short context", "long context", "short context"] {
        let key = (RowCount::new(8), PIECEWISE, variant);
        cache
            .get_or_capture(&tape, key, &mut (), |_, _| Ok(0))
            .unwrap();
    }
    assert_eq!(cache.len(), 2);
}

/// A full cache refuses by naming what to raise, and keeps what it has.
#[test]
fn bounds_are_named() {
    let tape = Tape::default();
    tape.segments_take(1000);
    let fill = |config| -> (String, usize) {
        let mut cache = cache(&[8, 16, 32], config);
        let kinds = [(PIECEWISE, ())];
        let error = cache
            .capture_all(&tape, &kinds, &mut (), |d, _| Ok(d.rows.get()), |_| ())
            .unwrap_err();
        assert!(cache.get(RowCount::new(32), PIECEWISE, ()).is_some());
        (error.to_string(), cache.len())
    };
    let (graphs, n) = fill(CacheConfig::default().max_graphs(2));
    assert_eq!(n, 2);
    let (bytes, n) = fill(CacheConfig::default().max_bytes(1500));
    assert_eq!(n, 2);
    insta::assert_snapshot!(format!("{graphs}\n{bytes}"), @r"
    piecewise graph of 8 rows: the cache holds 2 graphs already; raise `CacheConfig::max_graphs`
    piecewise graph of 8 rows: cached graphs take 2000 bytes of at most 1500; raise `CacheConfig::max_bytes`
    ");
}

/// A failed capture leaves the cache as it was, and the size can be tried again.
#[test]
fn a_failed_capture_is_not_kept() {
    let tape = Tape::default();
    let mut cache = cache(&[8], CacheConfig::default());
    let key = (RowCount::new(8), PIECEWISE, ());
    let failed = cache.get_or_capture(&tape, key, &mut (), |_, _| -> Result<u32> {
        Err(Error::program("no such expert"))
    });
    assert!(failed.is_err());
    assert!(cache.is_empty());
    cache
        .get_or_capture(&tape, key, &mut (), |_, _| Ok(1))
        .unwrap();
    assert_eq!(cache.len(), 1);
}

/// Dropping the graphs returns their memory.
#[test]
fn clearing_returns_the_memory() {
    let tape = Tape::default();
    tape.segments_take(1000);
    let mut cache = cache(&[8], CacheConfig::default());
    let key = (RowCount::new(8), PIECEWISE, ());
    cache
        .get_or_capture(&tape, key, &mut (), |_, _| Ok(1))
        .unwrap();
    tape.read();
    cache.clear(&tape).unwrap();
    assert_eq!(tape.read(), "drop segment 0\ntrim");
    assert_eq!((cache.len(), cache.memory().bytes()), (0, 0));
}

/// Planning sees a graph as its descriptor does.
#[test]
fn descriptors_are_graph_modes() {
    let cache = Cache::<()>::new(
        CaptureSizes::ladder(Window::new(128).unwrap(), 8192).unwrap(),
        CacheConfig::default(),
    );
    let descriptor = cache
        .descriptor(RowCount::new(2049), PIECEWISE, ())
        .unwrap();
    let padded_rows = RowCount::new(2304);
    assert_eq!(
        descriptor.graph_mode(),
        GraphMode::Piecewise { padded_rows }
    );
    assert!(cache.sizes().as_slice().len() <= CacheConfig::default().max_graphs);
}
