//! The replay layers, layer by layer and without a graph.

use replay_core::{LayerRows, StepPlan};

use crate::Error;

/// The replay layers of a decoder. Layers count from 0, the last KV source.
pub trait ReplayDecoder {
    /// Per-row tensors that go from layer to layer.
    type State;
    /// Per-row tensors of a layer whose KV is made, with that KV.
    type Entered;
    /// What can go wrong in the decoder's operations, and in the walk over its layers.
    type Error: From<Error>;

    /// Makes the layer's input and the KV of every entering row.
    ///
    /// # Errors
    /// What the decoder's operations fail with.
    fn enter(
        &mut self,
        layer: u32,
        state: Self::State,
        rows: &LayerRows<'_>,
    ) -> Result<Self::Entered, Self::Error>;

    /// Leaves only the rows with these indices among the entering ones, ascending; the KV stays
    /// whole, because the rows that are left still read it.
    ///
    /// # Errors
    /// What the decoder's operations fail with.
    fn gather(
        &mut self,
        entered: Self::Entered,
        index: &[u32],
    ) -> Result<Self::Entered, Self::Error>;

    /// Takes the running rows, which `entered` holds, through the rest of the layer.
    ///
    /// # Errors
    /// What the decoder's operations fail with.
    fn run(
        &mut self,
        layer: u32,
        entered: Self::Entered,
        rows: &LayerRows<'_>,
    ) -> Result<Self::State, Self::Error>;

    /// Finishes a layer in which no row runs: its KV is kept for later steps.
    ///
    /// # Errors
    /// What the decoder's operations fail with.
    fn skip(
        &mut self,
        layer: u32,
        entered: Self::Entered,
        rows: &LayerRows<'_>,
    ) -> Result<(), Self::Error>;
}

/// Runs all replay layers of a step. Gives the tensors of [`StepPlan::output_rows`], or `None` when
/// no row reaches the end.
///
/// # Errors
/// [`Error::EmptyPlan`] if nothing has been planned, and then the first error of the decoder.
pub fn run_replay_layers<D: ReplayDecoder>(
    decoder: &mut D,
    plan: &StepPlan,
    state: D::State,
) -> Result<Option<D::State>, D::Error> {
    refuse_empty(plan)?;
    run_from(decoder, plan, 0, state)
}

/// Goes on with the replay layers of a step whose cut has made the KV of every row already, as a
/// graph segment does before its break. `entered` holds the rows that run in the cut, and all KV that
/// they read. Otherwise as [`run_replay_layers`].
///
/// # Errors
/// As [`run_replay_layers`].
pub fn resume_replay_layers<D: ReplayDecoder>(
    decoder: &mut D,
    plan: &StepPlan,
    entered: D::Entered,
) -> Result<Option<D::State>, D::Error> {
    refuse_empty(plan)?;
    let cut = plan.layer(0);
    if cut.running.is_empty() {
        return Ok(None);
    }
    let state = decoder.run(0, entered, &cut)?;
    run_from(decoder, plan, 1, state)
}

/// Refuses a plan that has no layer. Without one the walk would hand the state back as if the layers
/// had run.
fn refuse_empty(plan: &StepPlan) -> Result<(), Error> {
    match plan.n_layers() {
        0 => Err(Error::EmptyPlan),
        _ => Ok(()),
    }
}

fn run_from<D: ReplayDecoder>(
    decoder: &mut D,
    plan: &StepPlan,
    first: u32,
    mut state: D::State,
) -> Result<Option<D::State>, D::Error> {
    let mut index = Vec::new();
    for layer in first..plan.n_layers() {
        let rows = plan.layer(layer);
        let mut entered = decoder.enter(layer, state, &rows)?;
        if rows.running.is_empty() {
            // Rows only ever get fewer, so the layers after this one have nothing to write either.
            decoder.skip(layer, entered, &rows)?;
            return Ok(None);
        }
        if rows.drops() {
            rows.gather_into(&mut index);
            entered = decoder.gather(entered, &index)?;
        }
        state = decoder.run(layer, entered, &rows)?;
    }
    Ok(Some(state))
}
