//! The replay policies by name.

use alloc::string::String;
use core::fmt;
use core::str::FromStr;

/// Which prefill rows go through the replay layers.
///
/// Decode rows, and every row of a request whose rows are all read
/// ([`Request::keeps_rows`](crate::Request::keeps_rows)), run under every policy.
///
/// ```
/// use replay_core::ReplayPolicy;
///
/// let policy: ReplayPolicy = "step-tail".parse()?;
/// assert_eq!(policy, ReplayPolicy::StepTail);
/// assert_eq!(ReplayPolicy::default().to_string(), "prompt-tail");
/// # Ok::<(), replay_core::UnknownPolicy>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "kebab-case"))]
pub enum ReplayPolicy {
    /// Every row: the reference that the others are measured against.
    Off,
    /// The last `min(q, W)` rows of each prefill chunk of `q` rows, as vLLM's decoder replay keeps
    /// them. Which rows run, and so the result, depends on how the prompt was cut into chunks.
    StepTail,
    /// The last `W` rows of the *prompt*. Which rows run, and which window KV each of them reads, does
    /// not depend on the chunks, so results of different chunks agree up to the order in which
    /// floating-point numbers are added. A chunk that holds none of these rows skips the replay layers.
    #[default]
    PromptTail,
    /// A tail of the prompt that shortens layer by layer, long enough that every row that runs is
    /// right: equal to [`Off`](Self::Off) up to rounding. Replay layer `i` of `0..=D` runs the last
    /// `R + (D - i) * (W - 1)` rows of the prompt.
    Exact,
}

impl ReplayPolicy {
    /// All policies: first the reference, then the two that approximate it, then the one that equals
    /// it.
    pub const ALL: [Self; 4] = [Self::Off, Self::StepTail, Self::PromptTail, Self::Exact];

    /// The name that [`FromStr`] takes.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::StepTail => "step-tail",
            Self::PromptTail => "prompt-tail",
            Self::Exact => "exact",
        }
    }
}

impl fmt::Display for ReplayPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for ReplayPolicy {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        Self::ALL
            .into_iter()
            .find(|policy| policy.name() == name)
            .ok_or_else(|| UnknownPolicy { got: name.into() })
    }
}

/// A name that is no policy's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no replay policy is called {}: expected off, step-tail, prompt-tail or exact",
    Quoted(got)
)]
pub struct UnknownPolicy {
    /// The name as given.
    pub got: String,
}

/// Longest name quoted in an error, in characters.
const MAX_QUOTED: usize = 60;

/// A name as an error quotes it: no more than its beginning, since it may be of any length.
struct Quoted<'a>(&'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.char_indices().nth(MAX_QUOTED) {
            Some((end, _)) => write!(f, "{:?}..", &self.0[..end]),
            None => write!(f, "{:?}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;

    use super::*;

    /// A name of any length would fill a terminal or a log.
    #[test]
    fn a_long_name_is_cut() {
        let refusal = "é".repeat(100_000).parse::<ReplayPolicy>().unwrap_err();
        let text = refusal.to_string();
        let quoted = alloc::format!("no replay policy is called \"{}\"..:", "é".repeat(60));
        assert!(text.starts_with(&quoted), "{text}");
    }
}
