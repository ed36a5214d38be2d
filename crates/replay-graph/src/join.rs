//! Two branches of a graph.

use candle_core::Device;

use crate::device::Frontier;
use crate::{Error, Result};

/// Runs `first`, then `second`. Where the device is being captured, they become two branches of the
/// graph: in a launch neither waits for the other, and what comes afterwards waits for both. Small
/// kernels that leave most of a device without work then run beside large ones.
///
/// Anywhere else, so without a capture and on a CPU, they run one after the other.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use replay_graph::{Error, join};
///
/// let x = Tensor::new(&[1f32, 2.0], &Device::Cpu)?;
/// let (sum, squares) = join(
///     x.device(),
///     || Ok::<_, Error>(x.sum_all()?),
///     || Ok(x.sqr()?),
/// )?;
/// assert_eq!(sum.to_scalar::<f32>()?, 3.0);
/// assert_eq!(squares.to_vec1::<f32>()?, [1.0, 4.0]);
/// # Ok::<(), Error>(())
/// ```
///
/// # What branches may do
///
/// Both may read what was there before, and allocate. None of this is checked, and all of it shows
/// only now and then, as wrong numbers:
///
/// * Neither writes what the other reads or writes. Memory that a library uses behind the scenes
///   counts: cuBLAS keeps one workspace for a stream, so one of the two may call it, not both.
/// * A tensor from before that both use is dropped by neither: borrow it. What is dropped in a branch is
///   freed there, and the other may still be reading it.
///
/// The longer branch is best given first: as far as the driver keeps the order, its blocks are the
/// first to get a place on the device, and those of the other fill what is left.
///
/// # Errors
///
/// What a branch fails with; [`Error::BreakInBranch`] if there is a break in one. The capture has to be
/// given up then, which it is where a program returns the error. [`Error::Driver`] if the driver fails.
pub fn join<A, B, E: From<Error>>(
    device: &Device,
    first: impl FnOnce() -> Result<A, E>,
    second: impl FnOnce() -> Result<B, E>,
) -> Result<(A, B), E> {
    let Some(fork) = Frontier::of(device)? else {
        return Ok((first()?, second()?));
    };
    let a = first()?;
    let Some(first_end) = Frontier::of(device)? else {
        // The capture has failed, which its end tells.
        return Ok((a, second()?));
    };
    fork.go_back()?;
    let b = second();
    // Also where the second has failed, or what the first has made would be freed too early.
    let joined = first_end.wait_as_well();
    let b = b?;
    joined?;
    Ok((a, b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn branches_run_in_order_and_the_first_failure_is_told() {
        let ran = std::cell::RefCell::new(Vec::new());
        let branch = |name: &'static str, fails: bool| {
            let ran = &ran;
            move || {
                ran.borrow_mut().push(name);
                let failed = Error::NoSuchBuffer { name: name.into() };
                if fails { Err(failed) } else { Ok(name) }
            }
        };
        let run = |a, b| join(&Device::Cpu, branch("first", a), branch("second", b));
        assert_eq!(run(false, false).unwrap(), ("first", "second"));
        for (a, b, told) in [(true, true, "first"), (false, true, "second")] {
            let error = run(a, b).unwrap_err().to_string();
            assert!(error.contains(told), "{error}");
        }
        let all = ["first", "second", "first", "first", "second"];
        assert_eq!(*ran.borrow(), all);
    }
}
