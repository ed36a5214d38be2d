//! What the program's kernels were built for, read from their PTX.

use std::{fmt, str::FromStr};

/// A version of two numbers: of CUDA, or a compute capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// The number before the dot.
    pub major: u32,
    /// The number after it.
    pub minor: u32,
}

impl Version {
    /// A version of these numbers.
    pub const fn new(major: u32, minor: u32) -> Self {
        Self { major, minor }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// An architecture that kernels are compiled for, such as `sm_90a`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arch {
    /// The compute capability.
    pub capability: Version,
    /// `a` or `f`, if only some GPUs have what the kernels may use.
    pub suffix: Option<char>,
}

impl Arch {
    /// Whether a GPU of that capability runs the kernels. A driver compiles PTX for the GPUs it
    /// finds: for newer ones too, but for one capability only with the suffix `a`, and for those of
    /// one family with `f`.
    pub fn runs_on(self, gpu: Version) -> bool {
        match self.suffix {
            None => gpu >= self.capability,
            Some('f') => gpu.major == self.capability.major && gpu >= self.capability,
            Some(_) => gpu == self.capability,
        }
    }

    /// The GPUs that run the kernels.
    pub(super) fn gpus(self) -> String {
        let least = self.capability;
        match self.suffix {
            None => format!("{least} or newer"),
            Some('f') => format!("{least} or newer of the same family"),
            Some(_) => least.to_string(),
        }
    }
}

impl FromStr for Arch {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let text = text.strip_prefix("sm_").ok_or(())?;
        let digits = text.trim_end_matches(|c: char| c.is_ascii_lowercase());
        let number: u32 = digits.parse().map_err(|_| ())?;
        Ok(Self {
            capability: Version::new(number / 10, number % 10),
            suffix: text[digits.len()..].chars().next(),
        })
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Version { major, minor } = self.capability;
        write!(f, "sm_{major}{minor}")?;
        self.suffix.map_or(Ok(()), |suffix| write!(f, "{suffix}"))
    }
}

/// What kernels were built with and for; `None` where their text does not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelTarget {
    /// The toolkit's CUDA. An older driver does not read the PTX.
    pub cuda: Option<Version>,
    /// The architecture.
    pub arch: Option<Arch>,
}

impl KernelTarget {
    /// The target of a PTX text. All kernels of a program, candle's as well, are compiled by one
    /// builder for one architecture, so one text speaks for all.
    pub fn of(ptx: &str) -> Self {
        let after = |mark: &str| {
            let rest = ptx.split_once(mark)?.1;
            rest.split([',', '\n', ' ']).next()
        };
        let cuda = after("Cuda compilation tools, release ").and_then(|release| {
            let (major, minor) = release.split_once('.')?;
            Some(Version::new(major.parse().ok()?, minor.parse().ok()?))
        });
        Self {
            cuda,
            arch: after("\n.target ").and_then(|arch| arch.parse().ok()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arch(text: &str) -> Arch {
        text.parse().unwrap()
    }

    #[test]
    fn the_target_is_read_from_the_text() {
        let text = "//\n// Cuda compilation tools, release 12.8, V12.8.93\n\n.version 8.7\n.target sm_120a, debug\n";
        let target = KernelTarget::of(text);
        assert_eq!(target.cuda, Some(Version::new(12, 8)));
        assert_eq!(target.arch.unwrap().to_string(), "sm_120a");
        let none = KernelTarget {
            cuda: None,
            arch: None,
        };
        assert_eq!(KernelTarget::of(""), none);
        assert_eq!(KernelTarget::of("release x\n.target compute"), none);
    }

    #[test]
    fn a_suffix_ties_kernels_to_some_gpus() {
        let gpus = [(8, 0), (9, 0), (10, 0), (10, 3), (12, 0)].map(|(a, b)| Version::new(a, b));
        let runs = |text| gpus.map(|gpu| arch(text).runs_on(gpu));
        assert_eq!(runs("sm_80"), [true; 5]);
        assert_eq!(runs("sm_90a"), [false, true, false, false, false]);
        assert_eq!(runs("sm_100f"), [false, false, true, true, false]);
        assert_eq!(runs("sm_100a"), [false, false, true, false, false]);
    }

    #[test]
    fn the_gpus_of_an_architecture_are_named() {
        let names = ["sm_80", "sm_90a", "sm_100f"].map(|text| arch(text).gpus());
        insta::assert_snapshot!(names.join("; "), @"8.0 or newer; 9.0; 10.0 or newer of the same family");
    }
}
