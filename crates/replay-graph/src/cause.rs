//! What an error means that surfaces inside a capture.

use crate::DriverStatus;

/// What a status code says about a capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// No memory is left.
    OutOfMemory,
    /// Memory was freed that the capture did not allocate.
    DroppedInside,
    /// Something that cannot be captured.
    Forbidden,
    /// Nothing in particular.
    Other,
}

impl DriverStatus {
    /// What it says when a call reports it while a stream is captured.
    ///
    /// The free of memory that is no graph allocation is an invalid value. The program has run
    /// before, in the warm-up, with the same arguments, so a kernel launch with arguments that are
    /// never valid is not what is left to suspect.
    pub(crate) const fn cause(self) -> Cause {
        match self.code() {
            1 => Cause::DroppedInside,
            2 => Cause::OutOfMemory,
            900..=908 => Cause::Forbidden,
            _ => Cause::Other,
        }
    }
}

/// Whether a tensor operation refused to copy host memory because a stream is captured.
///
/// The message is all there is to tell it by; a test on a device pins it.
pub(crate) fn is_refused_copy(error: &candle_core::Error) -> bool {
    matches!(innermost(error), candle_core::Error::Msg(text) if text.contains("CUDA graph capture"))
}

/// The error inside its backtrace and context.
pub(crate) fn innermost(error: &candle_core::Error) -> &candle_core::Error {
    use candle_core::Error as E;
    match error {
        E::Context { inner, .. } | E::WithPath { inner, .. } | E::WithBacktrace { inner, .. } => {
            innermost(inner)
        }
        error => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Copies are told by their message, however deep it lies.
    #[test]
    fn refused_copies_are_told_by_their_message() {
        let refused = candle_core::Error::Msg("CUDA graph capture missing cached host data".into());
        assert!(is_refused_copy(&refused));
        assert!(is_refused_copy(&refused.context("in layer 3")));
        assert!(!is_refused_copy(&candle_core::Error::Msg(
            "shape mismatch".into()
        )));
    }

    #[test]
    fn statuses_name_their_cause() {
        let cause = |code| DriverStatus::new(code).cause();
        assert_eq!(cause(1), Cause::DroppedInside);
        assert_eq!(cause(2), Cause::OutOfMemory);
        for code in 900..=908 {
            assert_eq!(cause(code), Cause::Forbidden, "{code}");
        }
        assert_eq!(cause(700), Cause::Other);
        assert_eq!(
            DriverStatus::new(2).to_string(),
            "CUDA status 2: out of memory"
        );
        assert_eq!(DriverStatus::new(12345).to_string(), "CUDA status 12345");
    }
}
