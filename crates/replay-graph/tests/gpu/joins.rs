//! Branches: that they are there, that what follows waits for both, and that memory of one is not the
//! other's.

use candle_core::Tensor;
use replay_graph::{BreakableGraph, Error, Result, Scope, join};

use crate::gpu::{Gpu, Layers, bits, gpu, large, rounds};

/// Some work that takes a while: products of a tensor with itself.
fn slow(x: &Tensor, times: usize) -> Result<Tensor> {
    let mut y = x.clone();
    for _ in 0..times {
        y = (y.matmul(x)? * 0.01)?;
    }
    Ok(y)
}

/// Some that takes as many steps, none of them by cuBLAS.
fn quick(x: &Tensor, times: usize) -> Result<Tensor> {
    let mut y = x.clone();
    for i in 0..times {
        y = (y.affine(0.5, i as f64)?.tanh()? + x)?;
    }
    Ok(y)
}

/// A chain that calls itself branches would give the right numbers too, and gain nothing.
#[test]
fn a_launch_does_not_wait_from_branch_to_branch() {
    let gpu = gpu();
    let x = gpu.tensor(&[64, 64], 1);
    let graph = BreakableGraph::capture(&gpu, |_| {
        let (a, b) = join(&gpu, || slow(&x, 6), || quick(&x, 4))?;
        Ok((a + b)?)
    })
    .unwrap();
    let nodes = graph.nodes().next().unwrap();
    println!("{nodes}, {} on the longest way", nodes.longest);
    // A product and a scaling each time, three kernels each time, and a sum.
    assert_eq!(nodes.work(), 6 * 2 + 4 * 3 + 1);
    assert_eq!(nodes.longest, 6 * 2 + 1);

    let graph = BreakableGraph::capture(&gpu, |_| Ok((slow(&x, 6)? + quick(&x, 4)?)?)).unwrap();
    let nodes = graph.nodes().next().unwrap();
    assert_eq!(nodes.longest, nodes.work());
}

/// What follows would read half of a result, or memory that a branch still writes: every launch gives
/// what an eager pass gives, bit for bit, whichever branch takes longer, and one inside another too.
#[test]
fn what_follows_waits_for_both() {
    let gpu = gpu();
    let width = large(1 << 14).isqrt() * 8;
    let x = gpu.tensor(&[width, width], 1);
    let run = |long: usize, short: usize| -> Result<Tensor> {
        let y = x.affine(1.0, 0.25)?;
        let (a, (b, c)) = join(
            &gpu,
            || slow(&y, long),
            || join(&gpu, || quick(&y, short), || quick(&x, long)),
        )?;
        // Freed while other branches may still run, if it was not waited for them.
        drop(y);
        let first = ((a + &b)? * &c)?;
        let (d, e) = join(&gpu, || quick(&first, short), || quick(&b, long))?;
        Ok(((d - e)? + c)?)
    };
    for (long, short) in [(4, 1), (1, 6)] {
        let mut graph = BreakableGraph::capture(&gpu, |_| run(long, short)).unwrap();
        for seed in rounds(20) {
            let next = gpu.tensor(&[width, width], seed);
            x.slice_set(&next, 0, 0).unwrap();
            let launched = bits(graph.launch().unwrap());
            assert_eq!(launched, bits(&run(long, short).unwrap()), "seed {seed}");
        }
    }
}

/// Many layers of branches, each of which allocates and frees: one that got the memory of another that
/// still runs would change its numbers.
#[test]
fn branches_do_not_share_memory() {
    let gpu = gpu();
    let layers = Layers::new(&gpu, 8, 256);
    let x = gpu.tensor(&[128, 256], 1);
    let run = || -> Result<Tensor> {
        let mut x = x.clone();
        for i in 0..8 {
            let (y, z) = join(&gpu, || layers.layer(i, &x), || quick(&x, 1 + i % 5))?;
            x = (y + (z * 0.125)?)?;
        }
        Ok(x)
    };
    let mut graph = BreakableGraph::capture(&gpu, |_| run()).unwrap();
    for seed in rounds(100) {
        x.slice_set(&gpu.tensor(&[128, 256], seed), 0, 0).unwrap();
        let launched = bits(graph.launch().unwrap());
        assert_eq!(launched, bits(&run().unwrap()), "seed {seed}");
    }
}

/// A branch without work, at the start of a segment and behind a break.
#[test]
fn branches_may_be_empty() {
    let gpu = gpu();
    let x = gpu.tensor(&[16], 1);
    let mut graph = BreakableGraph::capture(&gpu, |scope: &mut Scope<'_>| {
        let ((), a) = join(&gpu, || Ok::<_, Error>(()), || Ok(x.sqr()?))?;
        scope.eager_break(|()| Ok(()))?;
        let (b, ()) = join(&gpu, || Ok::<_, Error>(a.sqr()?), || Ok(()))?;
        let ((), ()) = join(&gpu, || Ok::<_, Error>(()), || Ok(()))?;
        Ok((b + a)?)
    })
    .unwrap();
    for seed in rounds(3) {
        x.slice_set(&gpu.tensor(&[16], seed), 0, 0).unwrap();
        let squares = x.sqr().unwrap();
        let expected = (squares.sqr().unwrap() + squares).unwrap();
        assert_eq!(bits(graph.launch().unwrap()), bits(&expected));
    }
}

/// Nodes of a segment that has ended are no place to go back to.
#[test]
fn a_break_in_a_branch_is_refused() {
    let gpu = gpu();
    let x = gpu.tensor(&[16], 1);
    for in_first in [true, false] {
        let refused = BreakableGraph::capture(&gpu, |scope: &mut Scope<'_>| {
            let scope = std::cell::RefCell::new(scope);
            let breaks = || scope.borrow_mut().eager_break(|()| Ok(()));
            // It keeps nothing: what a segment has allocated, and one that is given up frees, is never freed.
            let works = || {
                x.sqr()?;
                Ok::<_, Error>(())
            };
            if in_first {
                join(&gpu, breaks, works)?;
            } else {
                join(&gpu, works, breaks)?;
            }
            Ok(x.sqr()?)
        });
        let error = refused.unwrap_err();
        assert!(matches!(error, Error::BreakInBranch), "{error:?}");
        gpu.works();
    }
}

/// A branch that fails fails the capture, and a program that goes on without it gets right numbers.
#[test]
fn a_failed_branch_leaves_nothing_behind() {
    let gpu = gpu();
    let x = gpu.tensor(&[64, 64], 1);
    let fails = || Err::<Tensor, _>(Error::NoCuda);
    for fails_first in [true, false] {
        let failing = || {
            if fails_first {
                join(&gpu, fails, || slow(&x, 3))
            } else {
                join(&gpu, || slow(&x, 3), fails)
            }
        };
        let refused = BreakableGraph::capture(&gpu, |_| failing());
        assert!(matches!(refused.unwrap_err(), Error::NoCuda));
        gpu.works();

        let mut graph = BreakableGraph::capture(&gpu, |_| {
            assert!(failing().is_err());
            quick(&x, 3)
        })
        .unwrap();
        assert_eq!(bits(graph.launch().unwrap()), bits(&quick(&x, 3).unwrap()));
    }
}

/// Eager passes take the same code as captures.
#[test]
fn a_program_without_a_capture_runs_its_branches_in_turn() {
    let gpu: Gpu = gpu();
    let x = gpu.tensor(&[64, 64], 1);
    let (a, b) = join(&gpu, || slow(&x, 2), || quick(&x, 2)).unwrap();
    assert_eq!(bits(&a), bits(&slow(&x, 2).unwrap()));
    assert_eq!(bits(&b), bits(&quick(&x, 2).unwrap()));
}
