//! `cargo xtask cuda-toolkit`: a CUDA toolkit to build with, on a machine with or without one.
//!
//! An installed toolkit is used as it is. Without one, its parts are fetched as wheels from the
//! Python package index, at pinned versions and checksums, and put together under
//! `target/cuda-toolkit`. No GPU and no driver are needed to build: what a driver would bring,
//! `libcuda.so`, is stood in for by a stub at link time.

mod assemble;
mod stub;
mod wheels;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fmt};

use anyhow::{Context, Result, bail, ensure};

use crate::shell;

/// Find a CUDA toolkit or assemble one, and print the environment that builds with it.
///
/// To build by hand: `eval "$(cargo xtask cuda-toolkit)"`, or put the command after `--`.
#[derive(clap::Args)]
pub(crate) struct CudaToolkit {
    /// Say what would be used, and change nothing. Fails when the toolkit is not complete.
    #[arg(long)]
    check: bool,

    /// What the toolkit is for. `check` (also for clippy and rustdoc) fetches 100 MB, `build`
    /// another 570 MB for the libraries that programs are linked to.
    #[arg(long = "for", value_enum, default_value_t = Purpose::Build)]
    purpose: Purpose,

    /// A command to run in that environment.
    #[arg(last = true)]
    command: Vec<OsString>,
}

/// What a toolkit is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub(crate) enum Purpose {
    /// Type-checking: the compiler for kernels, and headers.
    Check,
    /// Linking programs too.
    Build,
}

impl CudaToolkit {
    pub(crate) fn run(self) -> Result<()> {
        if self.check {
            return check(self.purpose);
        }
        let toolkit = Toolkit::prepare(self.purpose)?;
        let Some((program, args)) = self.command.split_first() else {
            print!("{}", toolkit.exports());
            return Ok(());
        };
        let mut command = shell::command(program);
        command.args(args);
        toolkit.apply(&mut command);
        shell::run(command)
    }
}

/// `--check`.
fn check(purpose: Purpose) -> Result<()> {
    let folder = folder()?;
    if let Some(toolkit) = Toolkit::installed(&folder) {
        println!("{toolkit}");
        return Ok(());
    }
    let missing = assemble::missing(&folder, purpose);
    if missing.is_empty() {
        println!("{}", Toolkit::assembled(&folder)?);
        return Ok(());
    }
    for wheel in missing {
        println!("to fetch: {wheel}");
    }
    bail!(
        "no CUDA toolkit is installed, and {} is not complete: run `cargo xtask cuda-toolkit`",
        folder.display()
    );
}

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

impl Toolkit {
    /// The installed toolkit, or the assembled one, which is completed first where it must be.
    pub(crate) fn prepare(purpose: Purpose) -> Result<Self> {
        let folder = folder()?;
        if let Some(toolkit) = Self::installed(&folder) {
            eprintln!("{toolkit}");
            return Ok(toolkit);
        }
        assemble::assemble(&folder, purpose)?;
        let toolkit = Self::assembled(&folder)?;
        eprintln!("{toolkit}");
        Ok(toolkit)
    }

    /// The toolkit that `PATH` or one of the variables leads to, but for the one assembled here:
    /// these may be its own exports, and it may not be complete.
    fn installed(assembled: &Path) -> Option<Self> {
        let on_path = env::var_os("PATH").into_iter().flat_map(|path| {
            env::split_paths(&path)
                .map(|folder| folder.join("nvcc"))
                .collect::<Vec<_>>()
        });
        let named = ROOT_VARIABLES.iter().filter_map(env::var_os);
        let named = named.map(|root| PathBuf::from(root).join("bin/nvcc"));
        // A link on PATH, as distributions make it, leads to the toolkit.
        let found = named
            .chain(on_path)
            .filter_map(|nvcc| nvcc.canonicalize().ok());
        let assembled = assembled.canonicalize().ok();
        let ours = |nvcc: &PathBuf| {
            assembled
                .as_ref()
                .is_some_and(|ours| nvcc.starts_with(ours))
        };
        let nvcc = found
            .filter(|nvcc| nvcc.is_file())
            .find(|nvcc| !ours(nvcc))?;
        Self::of(nvcc.parent()?.parent()?, Origin::Installed).ok()
    }

    fn assembled(folder: &Path) -> Result<Self> {
        Self::of(&assemble::root(folder), Origin::Assembled)
    }

    fn of(root: &Path, origin: Origin) -> Result<Self> {
        let mut nvcc = Command::new(root.join("bin/nvcc"));
        nvcc.arg("--version");
        let version = version(&shell::read(nvcc)?)?;
        let root = root.to_path_buf();
        Ok(Self {
            root,
            origin,
            version,
        })
    }

    /// The variables to build with this toolkit.
    pub(crate) fn environment(&self) -> Vec<(&'static str, OsString)> {
        let mut variables: Vec<(&str, OsString)> = ROOT_VARIABLES
            .iter()
            .map(|name| (*name, self.root.clone().into()))
            .collect();
        let path = env::var_os("PATH").unwrap_or_default();
        let bin = self.root.join("bin");
        let path = std::iter::once(bin).chain(env::split_paths(&path));
        variables.push(("PATH", env::join_paths(path).unwrap_or_default()));
        let capability =
            env::var_os("CUDA_COMPUTE_CAP").or_else(|| compute_capability().map(Into::into));
        variables.push((
            "CUDA_COMPUTE_CAP",
            capability.unwrap_or_else(|| DEFAULT_COMPUTE_CAP.into()),
        ));
        variables
    }

    /// Lets a command build with this toolkit.
    pub(crate) fn apply(&self, command: &mut Command) {
        command.envs(self.environment());
    }

    /// Where the libraries are that programs built with this toolkit load.
    pub(crate) fn libraries(&self) -> PathBuf {
        self.root.join("lib64")
    }

    /// The environment in the syntax of a shell.
    fn exports(&self) -> String {
        let quoted = |value: &OsString| value.to_string_lossy().replace('\'', r"'\''");
        let environment = self.environment();
        let lines = environment
            .iter()
            .map(|(name, value)| format!("export {name}='{}'\n", quoted(value)));
        lines.collect()
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

/// Where a toolkit is assembled: beside what cargo builds.
fn folder() -> Result<PathBuf> {
    let metadata = shell::read(shell::cargo(&[
        "metadata",
        "--no-deps",
        "--format-version=1",
    ]))?;
    let metadata: serde_json::Value = serde_json::from_str(&metadata)?;
    let target = metadata["target_directory"]
        .as_str()
        .context("cargo metadata names no target")?;
    Ok(Path::new(target).join("cuda-toolkit"))
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
        let exports = toolkit.exports();
        assert!(
            exports.contains(r"export CUDA_HOME='/opt/it'\''s here'"),
            "{exports}"
        );
        let mut sh = Command::new("sh");
        sh.args(["-c", &format!("{exports}printf %s \"$CUDA_PATH\"")]);
        assert_eq!(shell::read(sh).unwrap(), "/opt/it's here");
        assert_eq!(
            toolkit.to_string(),
            "CUDA toolkit 13.0 (assembled from wheels): /opt/it's here"
        );
    }
}
