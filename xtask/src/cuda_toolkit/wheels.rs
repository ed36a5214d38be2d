//! The wheels that a toolkit is made of.

use std::fmt;

use super::Purpose;

/// A wheel of the Python package index, for Linux on x86-64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wheel {
    pub(super) name: &'static str,
    pub(super) version: &'static str,
    pub(super) sha256: &'static str,
    /// Size of the file.
    pub(super) megabytes: u32,
    /// What it is first needed for.
    pub(super) purpose: Purpose,
}

impl fmt::Display for Wheel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} ({} MB)", self.name, self.version, self.megabytes)
    }
}

/// The parts of CUDA 13.0: the newest toolkit that the drivers of 2025 run. All unpack into one
/// folder. To raise a version, take the checksum that the index shows for the file.
pub(super) const WHEELS: [Wheel; 8] = [
    Wheel {
        name: "nvidia-cuda-nvcc",
        version: "13.0.88",
        sha256: "56fe502eb77625a12f25172caa3cdddb4e4c8ba2c8c17dba44b164761b380f03",
        megabytes: 37,
        purpose: Purpose::Check,
    },
    Wheel {
        name: "nvidia-nvvm",
        version: "13.0.88",
        sha256: "c5f41ffeb6466944a026dfa5317d7d85355c119bbec279205d22f1869d1054e0",
        megabytes: 62,
        purpose: Purpose::Check,
    },
    Wheel {
        name: "nvidia-cuda-crt",
        version: "13.0.88",
        sha256: "2c8043c7c9e02492716426e9919fc78d2c5b3b2a7a768a88e952676b08aa55a4",
        megabytes: 1,
        purpose: Purpose::Check,
    },
    Wheel {
        name: "nvidia-cuda-cccl",
        version: "13.0.85",
        sha256: "e0da7ad981f3a8aff08241b5bfc1af868742a63e2762f53a5171c492ef242649",
        megabytes: 3,
        purpose: Purpose::Check,
    },
    Wheel {
        name: "nvidia-cuda-runtime",
        version: "13.0.96",
        sha256: "7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548",
        megabytes: 2,
        purpose: Purpose::Check,
    },
    Wheel {
        name: "nvidia-cuda-nvrtc",
        version: "13.0.88",
        sha256: "ad9b6d2ead2435f11cbb6868809d2adeeee302e9bb94bcf0539c7a40d80e8575",
        megabytes: 90,
        purpose: Purpose::Build,
    },
    Wheel {
        name: "nvidia-curand",
        version: "10.4.0.35",
        sha256: "1aee33a5da6e1db083fe2b90082def8915f30f3248d5896bcec36a579d941bfc",
        megabytes: 60,
        purpose: Purpose::Build,
    },
    Wheel {
        name: "nvidia-cublas",
        version: "13.0.2.14",
        sha256: "0cf238ffdbe46c00cb9aa98e7bca745c223a5ca5a53e686ac8b3e5a08fe80d6c",
        megabytes: 421,
        purpose: Purpose::Build,
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wheel_is_pinned() {
        for wheel in WHEELS {
            let hex = wheel.sha256.bytes().all(|b| b.is_ascii_hexdigit());
            assert!(hex && wheel.sha256.len() == 64, "{wheel}");
            assert!(
                wheel
                    .version
                    .bytes()
                    .all(|b| b.is_ascii_digit() || b == b'.'),
                "{wheel}"
            );
        }
    }
}
