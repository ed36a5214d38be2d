//! `cargo xtask readme`: runs the commands that README.md promises.

use std::{fs, time::Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::shell;

/// A line of its own, right above a `sh` block.
const MARK: &str = "<!-- xtask: run -->";

/// Run every fenced `sh` block of README.md that is marked `<!-- xtask: run -->`.
#[derive(clap::Args)]
pub(crate) struct Readme {
    /// Show the commands without running them.
    #[arg(long)]
    list: bool,
}

impl Readme {
    pub(crate) fn run(self) -> Result<()> {
        let blocks = marked_blocks()?;
        if self.list {
            for block in &blocks {
                println!("README.md:{}\n{}", block.line, block.text);
            }
            return Ok(());
        }
        run(&blocks)
    }
}

/// Runs all marked blocks but those whose text is `done`, which the caller runs itself.
pub(crate) fn run_except(done: &str) -> Result<()> {
    let mut blocks = marked_blocks()?;
    let all = blocks.len();
    blocks.retain(|block| block.text.trim() != done);
    ensure!(
        blocks.len() + 1 == all,
        "README.md: expected one marked block that is just `{done}`"
    );
    run(&blocks)
}

fn run(blocks: &[Block]) -> Result<()> {
    for block in blocks {
        println!("README.md:{}\n{}", block.line, block.text.trim_end());
        let started = Instant::now();
        let mut sh = shell::command("sh");
        sh.args(["-euc", &block.text]);
        shell::run(sh).with_context(|| format!("README.md:{}: the block fails", block.line))?;
        println!("-> {}", shell::time(started.elapsed()));
    }
    Ok(())
}

fn marked_blocks() -> Result<Vec<Block>> {
    let text = fs::read_to_string(shell::root().join("README.md")).context("README.md")?;
    blocks(&text)
}

/// A marked block and the line that its first command is on, from 1.
#[derive(Debug, PartialEq, Eq)]
struct Block {
    line: usize,
    text: String,
}

fn blocks(text: &str) -> Result<Vec<Block>> {
    let mut blocks = Vec::new();
    let mut lines = text.lines().enumerate();
    while let Some((at, line)) = lines.next() {
        if line.trim() != MARK {
            continue;
        }
        if lines.next().is_none_or(|(_, fence)| fence != "```sh") {
            bail!("README.md:{}: a mark with no sh block below it", at + 1);
        }
        let mut text = String::new();
        loop {
            match lines.next() {
                None => bail!("README.md:{}: the block is not closed", at + 2),
                Some((_, "```")) => break,
                Some((_, line)) => text.extend([line, "\n"]),
            }
        }
        blocks.push(Block { line: at + 3, text });
    }
    ensure!(
        !blocks.is_empty(),
        "README.md: no block is marked with {MARK}"
    );
    Ok(blocks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_marked_blocks_are_taken() {
        let text = format!("a\n```sh\nno\n```\n{MARK}\n```sh\none\ntwo\n```\n{MARK}\n```sh\n```\n");
        let found = blocks(&text).unwrap();
        let expected = |line, text: &str| Block {
            line,
            text: text.into(),
        };
        assert_eq!(found, [expected(7, "one\ntwo\n"), expected(12, "")]);
    }

    #[test]
    fn a_mark_that_would_run_nothing_is_an_error() {
        for (text, expected) in [
            ("", "no block is marked"),
            ("<!-- xtask: run -->", "README.md:1: a mark with no sh"),
            (
                "<!-- xtask: run -->\n```rust\n```\n",
                "README.md:1: a mark with no sh",
            ),
            (
                "\n<!-- xtask: run -->\n```sh\nls",
                "README.md:3: the block is not closed",
            ),
        ] {
            let error = blocks(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text:?}: {error}");
        }
    }
}
