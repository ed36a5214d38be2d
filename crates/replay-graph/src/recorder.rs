//! One capture: what has been recorded so far, and the moves that record more.

use crate::address::{BreakOutputs, addresses};
use crate::claim::Claim;
use crate::{
    Backend, CaptureMode, CaptureMove, CaptureOptions, CaptureState, DeviceMemory, Error,
    FixedBuffers, Result, Segment,
};

/// A capture under way. Dropped before it is done, by an error or a panic, it gives up: nothing is
/// being captured afterwards and the device is as it was.
///
/// Fields are dropped in the order in which they are written: what breaks own was allocated by the
/// segments, the driver's state outlives both, and the stream is free for others last.
pub(crate) struct Recorder<C, B: Backend> {
    pub(crate) breaks: Vec<Break<C>>,
    pub(crate) segments: Vec<B::Segment>,
    pub(crate) pinned: Vec<FixedBuffers>,
    pub(crate) options: CaptureOptions,
    state: CaptureState,
    backend: B,
    claim: Claim,
}

/// What runs between two segments, at each launch.
pub(crate) struct Break<C> {
    run: Box<BreakFn<C>>,
    /// Where its outputs were at capture.
    addresses: Vec<u64>,
}

/// Runs a break, and says where its outputs are if that is asked.
type BreakFn<C> = dyn FnMut(&mut C, bool) -> Result<Vec<u64>>;

impl<C, B: Backend> Recorder<C, B> {
    pub(crate) fn open(target: &B::Target, options: CaptureOptions) -> Result<Self> {
        let claim = Claim::take(B::stream(target)?, &options.label)?;
        Ok(Self {
            breaks: Vec::new(),
            segments: Vec::new(),
            pinned: options.buffers.clone(),
            state: CaptureState::Idle,
            backend: B::open(target, &options)?,
            options,
            claim,
        })
    }

    pub(crate) fn begin(&mut self, step: CaptureMove) -> Result<()> {
        let next = self.state.after(step)?;
        self.claim.set_in_break(false);
        match self.backend.begin() {
            Ok(()) => {
                self.state = next;
                Ok(())
            }
            Err(error) => Err(self.give_up(error)),
        }
    }

    /// Ends the segment and launches it at once: what it allocates is there only after a launch.
    pub(crate) fn end(&mut self, step: CaptureMove) -> Result<()> {
        let next = self.state.after(step)?;
        let ended = self.backend.end(self.state.segment()).and_then(|segment| {
            segment.launch()?;
            Ok(segment)
        });
        match ended {
            Ok(segment) => {
                self.segments.push(segment);
                self.state = next;
                Ok(())
            }
            Err(error) => Err(self.give_up(error)),
        }
    }

    /// Runs a break after the segment that is being captured, records it, and begins the next.
    pub(crate) fn eager_break<R: BreakOutputs>(
        &mut self,
        context: &mut C,
        mut run: impl FnMut(&mut C) -> Result<R> + 'static,
    ) -> Result<R> {
        let index = self.state.segment();
        self.end(CaptureMove::Break)?;
        self.claim.set_in_break(true);
        let outputs = match run(context).and_then(|r| Ok((self.check(index, &r)?, r))) {
            Ok((captured, outputs)) => {
                self.breaks.push(Break {
                    run: Box::new(move |context, locate| {
                        let outputs = run(context)?;
                        if locate {
                            addresses(&outputs)
                        } else {
                            Ok(Vec::new())
                        }
                    }),
                    addresses: captured,
                });
                outputs
            }
            Err(error @ Error::FreshAddress { .. }) => return Err(self.give_up(error)),
            Err(error) => {
                let source = Box::new(self.give_up(error));
                let label = self.options.label.clone();
                return Err(Error::Break {
                    label,
                    index,
                    source,
                });
            }
        };
        self.begin(CaptureMove::Resume)?;
        Ok(outputs)
    }

    /// Runs a break of the warm-up.
    pub(crate) fn warm_break<R>(&mut self, run: impl FnOnce() -> Result<R>) -> Result<R> {
        self.claim
            .set_in_break(self.options.mode == CaptureMode::Piecewise);
        let result = run();
        self.claim.set_in_break(false);
        result
    }

    /// Where a break's outputs are.
    ///
    /// # Errors
    ///
    /// If one is in no fixed buffer.
    fn check(&self, index: u32, outputs: &impl BreakOutputs) -> Result<Vec<u64>> {
        let all = addresses(outputs)?;
        let fresh = all
            .iter()
            .position(|&address| !self.pinned.iter().any(|buffers| buffers.holds(address)));
        match fresh {
            None => Ok(all),
            Some(output) => Err(Error::FreshAddress {
                label: self.options.label.clone(),
                index,
                output,
                address: all[output],
            }),
        }
    }

    pub(crate) fn pin(&mut self, buffers: &FixedBuffers) {
        if !self.pinned.iter().any(|pinned| pinned.is_same(buffers)) {
            self.pinned.push(buffers.clone());
        }
    }

    pub(crate) fn memory(&self) -> Result<DeviceMemory> {
        self.backend.memory()
    }

    pub(crate) fn claim(&self) -> &Claim {
        &self.claim
    }

    /// Names the cause of an error and gives the capture up.
    pub(crate) fn give_up(&mut self, error: Error) -> Error {
        if self.state == CaptureState::Failed {
            return error;
        }
        let error = self.backend.explain(error, self.state.segment());
        self.fail();
        error
    }

    fn fail(&mut self) {
        if self.state == CaptureState::Failed {
            return;
        }
        let Ok(next) = self.state.after(CaptureMove::Fail) else {
            return;
        };
        self.state = next;
        // Nothing may be freed while the stream is still captured.
        self.backend.abort();
        self.breaks.clear();
        self.segments.clear();
    }
}

impl<C, B: Backend> Drop for Recorder<C, B> {
    fn drop(&mut self) {
        self.fail();
        if self.state == CaptureState::Failed {
            // By now the program has dropped what it had allocated.
            self.backend.settle();
        }
    }
}

impl<C> Break<C> {
    pub(crate) fn launch(
        &mut self,
        context: &mut C,
        options: &CaptureOptions,
        index: u32,
    ) -> Result<()> {
        let check = options.check_addresses;
        let label = || options.label.clone();
        let now = (self.run)(context, check).map_err(|source| Error::Break {
            label: label(),
            index,
            source: Box::new(source),
        })?;
        if !check {
            return Ok(());
        }
        if now.len() != self.addresses.len() {
            return Err(Error::OutputCount {
                label: label(),
                index,
                expected: self.addresses.len(),
                got: now.len(),
            });
        }
        match (0..now.len()).find(|&i| now[i] != self.addresses[i]) {
            None => Ok(()),
            Some(output) => Err(Error::Moved {
                label: label(),
                index,
                output,
                expected: self.addresses[output],
                got: now[output],
            }),
        }
    }
}
