//! Running other programs, always at the root of the workspace.
//!
//! Standard input is never passed on: no task asks anything, so a program that does should fail at
//! once and not hang.

use std::{
    env,
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail};

/// The root of the workspace.
pub(crate) fn root() -> PathBuf {
    // Set at run time by `cargo run`; the fallback is for a binary that is started by itself.
    let xtask = env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    xtask
        .parent()
        .expect("xtask is a folder of the workspace")
        .to_path_buf()
}

/// A command that runs `program` at the root.
pub(crate) fn command(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(program);
    command.current_dir(root()).stdin(Stdio::null());
    command
}

/// A command that runs the cargo that started this program.
pub(crate) fn cargo(args: &[&str]) -> Command {
    let mut command = command(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args);
    command
}

/// Runs a command whose output goes to the terminal.
pub(crate) fn run(mut command: Command) -> Result<()> {
    let shown = show(&command);
    let status = command
        .status()
        .with_context(|| cannot_start(&command, &shown))?;
    if !status.success() {
        bail!("`{shown}` failed ({status})");
    }
    Ok(())
}

/// Runs a command and returns what it printed; its errors go to the terminal.
pub(crate) fn read(mut command: Command) -> Result<String> {
    let shown = show(&command);
    command.stderr(Stdio::inherit());
    let output = command
        .output()
        .with_context(|| cannot_start(&command, &shown))?;
    if !output.status.success() {
        bail!("`{shown}` failed ({})", output.status);
    }
    String::from_utf8(output.stdout).with_context(|| format!("`{shown}` printed no UTF-8"))
}

fn cannot_start(command: &Command, shown: &str) -> String {
    let program = command.get_program().to_string_lossy();
    if PACKAGES.iter().any(|(name, _)| *name == program) && !is_on_path(&program) {
        return format!("cannot start `{shown}`: {}", install(&program));
    }
    format!("cannot start `{shown}`")
}

/// Programs that a machine may lack, and the packages of Debian and Ubuntu that have them.
const PACKAGES: [(&str, &str); 7] = [
    ("python3", "python3 python3-pip"),
    ("pip", "python3 python3-pip"),
    ("cc", "gcc libc6-dev"),
    ("g++", "g++"),
    ("strip", "binutils"),
    ("tar", "tar"),
    ("git", "git"),
];

/// What to do to get a program.
pub(crate) fn install(program: &str) -> String {
    let found = PACKAGES.iter().find(|(name, _)| *name == program);
    let packages = found.map_or(program, |(_, packages)| packages);
    format!("install {program} (Debian, Ubuntu: apt-get install {packages})")
}

/// Whether the shell would find a program.
pub(crate) fn is_on_path(program: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// The command as a person would type it, with the variables that were set for it.
pub(crate) fn show(command: &Command) -> String {
    let program = PathBuf::from(command.get_program());
    let program = program.file_name().unwrap_or(command.get_program());
    let mut words: Vec<String> = command
        .get_envs()
        .filter_map(|(key, value)| Some((key, value?)))
        .map(|(key, value)| format!("{}={}", key.display(), quote(&value.to_string_lossy())))
        .collect();
    words.push(quote(&program.to_string_lossy()));
    words.extend(command.get_args().map(|arg| quote(&arg.to_string_lossy())));
    words.join(" ")
}

fn quote(word: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "-_=/.,:+@".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.into()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// A duration for a person.
pub(crate) fn time(elapsed: Duration) -> String {
    let seconds = elapsed.as_secs();
    match seconds {
        0..60 => format!("{:.1} s", elapsed.as_secs_f64()),
        _ => format!("{} min {:02} s", seconds / 60, seconds % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_shown_as_it_would_be_typed() {
        let mut command = Command::new("/opt/bin/cargo");
        command
            .args(["test", "it's", ""])
            .env("RUSTDOCFLAGS", "-D warnings");
        assert_eq!(
            show(&command),
            r"RUSTDOCFLAGS='-D warnings' cargo test 'it'\''s' ''"
        );
    }

    #[test]
    fn a_failing_command_is_named() {
        let mut failing = Command::new("sh");
        failing.args(["-c", "exit 3"]);
        let error = run(failing).unwrap_err().to_string();
        assert!(error.contains("sh -c 'exit 3'"), "{error}");
        assert!(error.contains('3'), "{error}");
        let error = run(Command::new("no-such-program"))
            .unwrap_err()
            .to_string();
        assert_eq!(error, "cannot start `no-such-program`");
        // What a task needs is named as what to install.
        assert!(is_on_path("sh") && !is_on_path("no-such-program"));
        let hint = install("cc");
        assert_eq!(
            hint,
            "install cc (Debian, Ubuntu: apt-get install gcc libc6-dev)"
        );
    }

    #[test]
    fn times_are_short() {
        assert_eq!(time(Duration::from_millis(1_260)), "1.3 s");
        assert_eq!(time(Duration::from_secs(61)), "1 min 01 s");
    }
}
