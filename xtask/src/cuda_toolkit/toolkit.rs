//! The toolkit that is used: which one, and the environment that builds with it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fmt};

use anyhow::{Context, Result, ensure};

use super::{Purpose, assemble};
use crate::shell;

/// A CUDA toolkit.
pub(crate) struct Toolkit {
    root: PathBuf,
    origin: Origin,
    /// As nvcc says it, for example `13.0`.
    version: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    Installed,
    Assembled,
}

/// The variables that the build scripts of cudarc, candle-kernels and ours look at.
const ROOT_VARIABLES: [&str; 4] = [
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_ROOT",
    "CUDA_TOOLKIT_ROOT_DIR",
];

/// The compute capability that kernels are compiled for where no GPU says another: Hopper.
const DEFAULT_COMPUTE_CAP: &str = "90";

/// The oldest release that has all of the driver's calls that are made.
const OLDEST: (u32, u32) = (12, 3);

impl Toolkit {
    /// The installed toolkit, or the assembled one, which is completed first where it must be.
    pub(crate) fn prepare(purpose: Purpose) -> Result<Self> {
        let folder = super::folder()?;
        if env::var_os("NVCC_CCBIN").is_none() && !shell::is_on_path("g++") {
            eprintln!(
                "nvcc compiles with g++, which is not on PATH: {}",
                shell::install("g++")
            );
        }
        if let Some(toolkit) = Self::installed(&folder) {
            eprintln!("{toolkit}");
            return Ok(toolkit);
        }
        assemble::assemble(&folder, purpose)
            .with_context(|| format!("cannot assemble a toolkit in {}", folder.display()))?;
        let toolkit = Self::assembled(&folder)?;
        eprintln!("{toolkit}");
        Ok(toolkit)
    }

    /// The toolkit that one of the variables or `PATH` leads to. Says which it does not take, and why.
    pub(super) fn installed(assembled: &Path) -> Option<Self> {
        let named = ROOT_VARIABLES.iter().filter_map(env::var_os);
        let named = named
            .filter(|root| !root.is_empty())
            .map(|root| PathBuf::from(root).join("bin/nvcc"));
        let path = env::var_os("PATH").unwrap_or_default();
        // Most folders on PATH have no nvcc, and nothing is wrong with that.
        let on_path = env::split_paths(&path)
            .map(|folder| folder.join("nvcc"))
            .filter(|nvcc| nvcc.is_file());
        Self::first_of(named.chain(on_path), assembled, &mut |skipped| {
            eprintln!("{skipped}");
        })
    }

    /// The toolkit of the first nvcc that works and is new enough, but for the one assembled here:
    /// variables may be its own exports, and it may not be complete.
    fn first_of(
        candidates: impl Iterator<Item = PathBuf>,
        assembled: &Path,
        skipped: &mut dyn FnMut(String),
    ) -> Option<Self> {
        let ours = assembled.canonicalize().ok();
        let mut seen = Vec::new();
        for named in candidates {
            // A link on PATH, as distributions make it, leads to the toolkit.
            let nvcc = named.canonicalize().unwrap_or_else(|_| named.clone());
            let is_ours = ours.as_ref().is_some_and(|ours| nvcc.starts_with(ours));
            if is_ours || named.starts_with(assembled) || seen.contains(&nvcc) {
                continue;
            }
            match nvcc.parent().and_then(Path::parent).map(Self::usable) {
                Some(Ok(toolkit)) => return Some(toolkit),
                Some(Err(error)) => skipped(format!("skipped {}: {error:#}", nvcc.display())),
                None => {}
            }
            seen.push(nvcc);
        }
        None
    }

    /// An installed toolkit that the workspace can be built with.
    fn usable(root: &Path) -> Result<Self> {
        let toolkit = Self::of(root, Origin::Installed)?;
        let mut parts = toolkit.version.split('.').map(|part| part.parse().ok());
        let mut part = || parts.next().flatten();
        let release = part().zip(part());
        ensure!(
            release.is_some_and(|release| release >= OLDEST),
            "expected CUDA {}.{} or newer, got {}",
            OLDEST.0,
            OLDEST.1,
            toolkit.version
        );
        Ok(toolkit)
    }

    pub(super) fn assembled(folder: &Path) -> Result<Self> {
        Self::of(&assemble::root(folder), Origin::Assembled).with_context(|| {
            format!(
                "the assembled toolkit does not work: delete {} and run this again",
                folder.display()
            )
        })
    }

    fn of(root: &Path, origin: Origin) -> Result<Self> {
        let path = root.join("bin/nvcc");
        let mut nvcc = Command::new(&path);
        nvcc.arg("--version").stdin(Stdio::null());
        let version = shell::read(nvcc).and_then(|printed| version(&printed));
        Ok(Self {
            root: root.to_path_buf(),
            origin,
            version: version.with_context(|| format!("{} is no nvcc that runs", path.display()))?,
        })
    }

    /// The variables to build with this toolkit.
    pub(crate) fn environment(&self) -> Result<Vec<(&'static str, OsString)>> {
        let mut variables: Vec<(&str, OsString)> = ROOT_VARIABLES
            .iter()
            .map(|name| (*name, self.root.clone().into()))
            .collect();
        let path = env::var_os("PATH").unwrap_or_default();
        let bin = self.root.join("bin");
        let path = std::iter::once(bin).chain(env::split_paths(&path));
        let path = env::join_paths(path).with_context(|| {
            format!("{} cannot be put on PATH", self.root.join("bin").display())
        })?;
        variables.push(("PATH", path));
        // For programs that are run: the libraries of a toolkit from wheels lie where no loader looks.
        let folders = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let folders = env::split_paths(&folders).filter(|folder| !folder.as_os_str().is_empty());
        let folders = env::join_paths(std::iter::once(self.libraries()).chain(folders))
            .context("LD_LIBRARY_PATH cannot be extended")?;
        variables.push(("LD_LIBRARY_PATH", folders));
        let capability = match env::var_os("CUDA_COMPUTE_CAP") {
            Some(capability) => Some(checked_capability(capability)?),
            None => compute_capability().map(Into::into),
        };
        variables.push((
            "CUDA_COMPUTE_CAP",
            capability.unwrap_or_else(|| DEFAULT_COMPUTE_CAP.into()),
        ));
        Ok(variables)
    }

    /// Lets a command build with this toolkit.
    pub(crate) fn apply(&self, command: &mut Command) -> Result<()> {
        command.envs(self.environment()?);
        Ok(())
    }

    /// Where the libraries are that programs built with this toolkit load.
    pub(crate) fn libraries(&self) -> PathBuf {
        self.root.join("lib64")
    }

    /// The environment in the syntax of a shell.
    pub(super) fn exports(&self) -> Result<String> {
        let quoted = |value: &OsString| value.to_string_lossy().replace('\'', r"'\''");
        let environment = self.environment()?;
        let lines = environment
            .iter()
            .map(|(name, value)| format!("export {name}='{}'\n", quoted(value)));
        Ok(lines.collect())
    }
}

impl fmt::Display for Toolkit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let origin = match self.origin {
            Origin::Installed => "installed",
            Origin::Assembled => "assembled from wheels",
        };
        write!(
            f,
            "CUDA toolkit {} ({origin}): {}",
            self.version,
            self.root.display()
        )
    }
}

/// The release in what `nvcc --version` prints.
fn version(printed: &str) -> Result<String> {
    let release = printed
        .split("release ")
        .nth(1)
        .and_then(|rest| rest.split([',', '\n']).next());
    let release = release.with_context(|| format!("nvcc says no release: {printed:?}"))?;
    ensure!(
        release.contains('.'),
        "nvcc says a strange release: {release:?}"
    );
    Ok(release.trim().to_owned())
}

/// A compute capability that somebody set, if the build scripts understand it.
fn checked_capability(capability: OsString) -> Result<OsString> {
    let text = capability.to_string_lossy();
    let digits = text.strip_suffix(['a', 'f']).unwrap_or(&text);
    let is_number = digits.bytes().all(|b| b.is_ascii_digit()) && !digits.starts_with('0');
    ensure!(
        is_number && (2..=3).contains(&digits.len()),
        "CUDA_COMPUTE_CAP: expected a compute capability without its dot, such as 90 or 100a, got {text:?}"
    );
    Ok(capability)
}

/// The compute capability of the first GPU of this machine, without its dot.
fn compute_capability() -> Option<String> {
    let mut query = Command::new("nvidia-smi");
    query.args(["--query-gpu=compute_cap", "--format=csv,noheader"]);
    let output = query
        .output()
        .ok()
        .filter(|output| output.status.success())?;
    let printed = String::from_utf8(output.stdout).ok()?;
    let capability = printed.lines().next()?.trim().replace('.', "");
    (!capability.is_empty() && capability.bytes().all(|b| b.is_ascii_digit())).then_some(capability)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_release_is_read_from_what_nvcc_prints() {
        let printed = "nvcc: NVIDIA (R) Cuda compiler driver\n\
                       Cuda compilation tools, release 13.0, V13.0.88\n";
        assert_eq!(version(printed).unwrap(), "13.0");
        assert!(version("no such thing").is_err());
    }

    #[test]
    fn exports_can_be_evaluated() {
        let toolkit = Toolkit {
            root: "/opt/it's here".into(),
            origin: Origin::Assembled,
            version: "13.0".into(),
        };
        let exports = toolkit.exports().unwrap();
        assert!(
            exports.contains(r"export CUDA_HOME='/opt/it'\''s here'"),
            "{exports}"
        );
        let mut sh = Command::new("sh");
        sh.args(["-c", &format!("{exports}printf %s \"$CUDA_PATH\"")]);
        assert_eq!(shell::read(sh).unwrap(), "/opt/it's here");
        let libraries = "export LD_LIBRARY_PATH='/opt/it'\\''s here/lib64";
        assert!(exports.contains(libraries), "{exports}");
        assert_eq!(
            toolkit.to_string(),
            "CUDA toolkit 13.0 (assembled from wheels): /opt/it's here"
        );
    }

    #[test]
    fn a_capability_that_no_build_understands_is_refused() {
        for good in ["75", "90", "90a", "100", "121f"] {
            assert_eq!(checked_capability(good.into()).unwrap(), good);
        }
        for bad in ["", "9", "9.0", "sm_90", "90b", "a", "090", "9000"] {
            let error = checked_capability(bad.into()).unwrap_err().to_string();
            assert!(error.contains(&format!("got {bad:?}")), "{error}");
        }
    }

    /// One broken compiler must not hide another that works, nor be passed over in silence.
    #[test]
    fn the_first_nvcc_that_works_is_taken() {
        let folder = env::temp_dir().join(format!("nvcc-{}", std::process::id()));
        let nvcc = |name: &str, script: &str| {
            let bin = folder.join(name).join("bin");
            let file = bin.join("nvcc");
            let mut sh = Command::new("sh");
            // Written by another process: a file that is open here cannot be run yet.
            sh.args([
                "-c",
                "mkdir -p \"$1\" && echo \"$2\" >\"$3\" && chmod +x \"$3\"",
                "sh",
            ]);
            sh.arg(&bin).arg(format!("#!/bin/sh\n{script}")).arg(&file);
            shell::run(sh).unwrap();
            file
        };
        let release = |release: &str| format!("echo 'tools, release {release}, V{release}.1'");
        let candidates = [
            nvcc("ours", &release("13.0")),
            folder.join("empty/bin/nvcc"),
            nvcc("broken", "exit 9"),
            nvcc("silent", "echo nothing"),
            nvcc("old", &release("11.8")),
            nvcc("a little old", &release("12.2")),
            nvcc("old", &release("11.8")),
            nvcc("a little old", &release("12.2")),
            nvcc("good", &release("12.4")),
            nvcc("newer", &release("13.0")),
        ];
        let mut skipped = Vec::new();
        let found = Toolkit::first_of(candidates.into_iter(), &folder.join("ours"), &mut |text| {
            skipped.push(text);
        });
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(found.unwrap().version, "12.4");
        let expected = [
            ("empty", "cannot start"),
            ("broken", "failed"),
            ("silent", "no release"),
            ("old", "expected CUDA 12.3 or newer, got 11.8"),
            ("a little old", "expected CUDA 12.3 or newer, got 12.2"),
        ];
        assert_eq!(skipped.len(), expected.len(), "{skipped:?}");
        for (text, (name, why)) in skipped.iter().zip(expected) {
            let named = text.contains(&format!("{name}/bin/nvcc"));
            assert!(named && text.contains(why), "{text}");
        }
    }
}
