//! Compares a checkpoint with what the decoder needs, before any weight is read.

use std::collections::{BTreeSet, HashMap};

use rayon::prelude::*;

use super::{
    checkpoint::Checkpoint,
    error::WeightsError,
    manifest::{self, Manifest, Part},
    problem::Problem,
    stored::{self, Stored},
    table::EngramTable,
};
use crate::config::ExpertDtype;

/// A checkpoint in which everything was found.
pub(super) struct Resolved {
    /// The parts of each target of the manifest.
    pub(super) sources: Vec<Vec<Stored>>,
    /// By layer.
    pub(super) tables: HashMap<usize, EngramTable>,
    /// Scales that are not finite.
    pub(super) bad_scales: Vec<Problem>,
}

/// Finds every part of the manifest; all that is missing, left over or does not fit fails together,
/// with the scales that are not finite. `expert_dtype` is what the configuration says of the routed experts.
/// Where all fits, the scales wait for the values that are not.
///
/// Of the values only the scales are read (a thirty-second of the matrices or less), in parallel.
/// The others are not looked at here: that takes every byte of the checkpoint, hundreds of gigabytes
/// of a released one, while the headers say at once that it is the wrong one.
pub(super) fn resolve(
    manifest: &Manifest,
    checkpoint: &Checkpoint,
    expert_dtype: Option<ExpertDtype>,
) -> Result<Resolved, WeightsError> {
    let mut search = Search {
        checkpoint,
        known: BTreeSet::new(),
        problems: Vec::new(),
    };
    let sources: Vec<Vec<Stored>> = manifest
        .targets
        .iter()
        .map(|target| search.find_all(&target.parts))
        .collect();
    let mut tables = HashMap::new();
    for table in &manifest.tables {
        if let Some(stored) = search.find(&table.part) {
            stored.expect_scattered_reads();
            tables.insert(table.layer, EngramTable::new(stored));
        }
    }

    let said_otherwise = expert_dtype.and_then(|said| unlike(manifest, &sources, said));
    search.problems.extend(said_otherwise);
    let mut problems = search.finish();
    let matrices = sources.par_iter().flatten();
    let bad_scales: Vec<Problem> = matrices.filter_map(Stored::check_scales).collect();
    if !problems.is_empty() {
        problems.extend(bad_scales);
        return Err(WeightsError::in_checkpoint(&checkpoint.dir, problems));
    }
    Ok(Resolved {
        sources,
        tables,
        bad_scales,
    })
}

/// Says that no matrix of routed experts is stored as the configuration has it: the weights are those of
/// another file. Some may be stored otherwise.
fn unlike(manifest: &Manifest, sources: &[Vec<Stored>], said: ExpertDtype) -> Option<Problem> {
    let experts = || {
        let targets = manifest.targets.iter().zip(sources);
        let of_experts = targets.filter(|(target, _)| target.is_of_experts());
        of_experts.flat_map(|(_, parts)| parts)
    };
    let first = experts().next()?;
    let any = experts().any(|matrix| matrix.stored_as() == said);
    (!any).then(|| first.not_stored_as(said))
}

struct Search<'a> {
    checkpoint: &'a Checkpoint,
    /// Names of tensors that the manifest accounts for.
    known: BTreeSet<String>,
    problems: Vec<Problem>,
}

impl Search<'_> {
    fn find_all(&mut self, parts: &[Part]) -> Vec<Stored> {
        parts.iter().filter_map(|part| self.find(part)).collect()
    }

    fn find(&mut self, part: &Part) -> Option<Stored> {
        let tensors = &self.checkpoint.tensors;
        self.known.insert(part.name.clone());
        // A tensor that is always plain owns no scale: one of that name is unexpected.
        let scale = part.quantisable.then(|| stored::scale_name(&part.name));
        let scales = scale.as_ref().and_then(|name| tensors.get(name));
        self.known.extend(scale);

        let found = match tensors.get(&part.name) {
            Some(raw) => Stored::new(part, raw, scales),
            None => Err(Problem::Missing {
                tensor: part.name.clone(),
                shape: part.shape.clone(),
            }),
        };
        found.map_err(|problem| self.problems.push(problem)).ok()
    }

    /// All problems, the tensors that nothing asked for included.
    fn finish(mut self) -> Vec<Problem> {
        for (name, raw) in &self.checkpoint.tensors {
            if !self.known.contains(name) && !manifest::is_skipped(name) {
                self.problems.push(Problem::Unexpected {
                    tensor: name.clone(),
                    file: raw.file(),
                });
            }
        }
        self.problems
    }
}
