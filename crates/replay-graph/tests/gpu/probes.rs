//! Programs that use the memory of graphs as CUDA's documents allow, without candle and cuBLAS.
//!
//! A driver that fails one breaks what captures are built on. A sanitizer that reports one is wrong,
//! and what it says of the same use of memory elsewhere is worth nothing: the runner runs each alone
//! under memcheck before it believes it.

use candle_core::cuda_backend::cudarc::driver::sys::{
    CUgraphInstantiate_flags as Flags, CUstreamCaptureMode as Mode,
};
use candle_core::cuda_backend::cudarc::driver::{CudaGraph, CudaSlice, DevicePtr};

use crate::gpu::{Gpu, gpu};
use crate::streams::{filled, set_event_tracking};

/// Words of 16 KiB, and of 1 KiB: the driver hands memory out by 512 bytes.
const LARGE: u32 = 4096;
const SMALL: u32 = 256;

struct Probe {
    gpu: Gpu,
    /// Written by each launch: the last word of every piece of memory.
    last: CudaSlice<u32>,
}

impl Probe {
    fn new() -> Self {
        let gpu = gpu();
        set_event_tracking(&gpu, false);
        // The kernel is loaded before anything is captured.
        drop(filled(&gpu, SMALL, 0));
        let last = gpu.stream().alloc_zeros(8).unwrap();
        Self { gpu, last }
    }

    fn graph(&mut self, body: impl FnOnce(&mut Self)) -> CudaGraph {
        let stream = self.gpu.stream();
        let mode = Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        stream.begin_capture(mode).unwrap();
        body(self);
        let flags = Flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        stream.end_capture(flags).unwrap().unwrap()
    }

    /// Memory with a number of its own in every word.
    fn memory(&mut self, words: u32, number: u32) -> CudaSlice<u32> {
        let memory = filled(&self.gpu, words, number);
        let (at, _) = memory.device_ptr(&self.gpu.stream());
        println!("memory {number}: {words} words at {at:#x}");
        self.look(&memory, number);
        memory
    }

    fn look(&mut self, memory: &CudaSlice<u32>, number: u32) {
        let i = number as usize;
        let word = memory.slice(memory.len() - 1..);
        let mut last = self.last.slice_mut(i..=i);
        self.gpu.stream().memcpy_dtod(&word, &mut last).unwrap();
    }

    /// Checks that the memories with these numbers have been filled since the last check.
    #[track_caller]
    fn check(&mut self, numbers: &[u32]) {
        let stream = self.gpu.stream();
        let last = stream.clone_dtoh(&self.last).unwrap();
        for &number in numbers {
            assert_eq!(last[number as usize], number, "{last:?}");
        }
        stream.memset_zeros(&mut self.last).unwrap();
    }
}

/// One piece of memory after the other, each freed before the next is there.
#[track_caller]
fn check_pieces(sizes: &[u32], upload: bool, launches: u32) {
    let mut probe = Probe::new();
    let numbers: Vec<u32> = (1..).take(sizes.len()).collect();
    let graph = probe.graph(|probe| {
        for (&words, &number) in sizes.iter().zip(&numbers) {
            drop(probe.memory(words, number));
        }
    });
    if upload {
        graph.upload().unwrap();
    }
    for _ in 0..launches {
        graph.launch().unwrap();
        probe.check(&numbers);
    }
}

#[test]
fn one_piece() {
    check_pieces(&[LARGE], false, 3);
}

#[test]
fn one_piece_after_an_upload() {
    check_pieces(&[LARGE], true, 3);
}

#[test]
fn the_same_size_again() {
    check_pieces(&[LARGE, LARGE], false, 3);
}

#[test]
fn a_smaller_one_in_its_place() {
    check_pieces(&[LARGE, SMALL], false, 1);
}

#[test]
fn a_smaller_one_in_its_place_launched_again() {
    check_pieces(&[LARGE, SMALL], false, 3);
}

#[test]
fn a_smaller_one_in_its_place_after_an_upload() {
    check_pieces(&[LARGE, SMALL], true, 3);
}

#[test]
fn a_larger_one_in_its_place() {
    check_pieces(&[SMALL, LARGE, SMALL, LARGE], true, 3);
}

/// A graph that leaves memory behind: its last piece is what the program gives, and lives until the
/// next launch frees it.
#[test]
fn a_smaller_one_in_its_place_that_stays() {
    let mut probe = Probe::new();
    let mut stays = None;
    let graph = probe.graph(|probe| {
        drop(probe.memory(LARGE, 1));
        stays = Some(probe.memory(SMALL, 2));
    });
    for _ in 0..3 {
        graph.launch().unwrap();
        probe.check(&[1, 2]);
    }
}

/// The pieces of a small product: a temporary's place is taken by two smaller ones, of which the last
/// stays.
#[test]
fn two_smaller_ones_in_its_place() {
    let mut probe = Probe::new();
    let mut stays = None;
    let graph = probe.graph(|probe| {
        let first = probe.memory(960, 1);
        let second = probe.memory(960, 2);
        drop(first);
        let third = probe.memory(96, 3);
        stays = Some(probe.memory(68, 4));
        drop(third);
        drop(second);
    });
    for _ in 0..3 {
        graph.launch().unwrap();
        probe.check(&[1, 2, 3, 4]);
    }
}

#[test]
fn two_graphs_in_turn() {
    let mut probe = Probe::new();
    let first = probe.graph(|probe| drop(probe.memory(LARGE, 1)));
    let second = probe.graph(|probe| drop(probe.memory(SMALL, 2)));
    for _ in 0..3 {
        first.launch().unwrap();
        probe.check(&[1]);
        second.launch().unwrap();
        probe.check(&[2]);
    }
}

/// Its addresses may be those of the one that is gone.
#[test]
fn a_graph_in_place_of_another() {
    let mut probe = Probe::new();
    for words in [LARGE, SMALL, LARGE, 4 * LARGE, SMALL] {
        let graph = probe.graph(|probe| drop(probe.memory(words, 1)));
        for _ in 0..2 {
            graph.launch().unwrap();
            probe.check(&[1]);
        }
    }
}

/// Memory that one graph allocates, eager work and another graph read, and that other graph frees.
#[test]
fn memory_across_two_graphs() {
    let mut probe = Probe::new();
    let mut across = None;
    let first = probe.graph(|probe| across = Some(probe.memory(LARGE, 1)));
    // Mapped by a launch.
    first.launch().unwrap();
    let across = across.unwrap();
    probe.check(&[1]);
    let mut eager = probe.memory(SMALL, 2);
    probe.look(&across, 1);
    probe.check(&[1, 2]);
    let second = probe.graph(|probe| {
        probe.look(&across, 1);
        drop(across);
        drop(probe.memory(SMALL, 3));
        drop(probe.memory(4 * LARGE, 4));
    });
    second.launch().unwrap();
    probe.check(&[1, 3, 4]);
    for round in 0..3 {
        first.launch().unwrap();
        probe.check(&[1]);
        // Memory of the pool that eager work shares, of another size each time.
        eager = probe.memory(SMALL << round, 2);
        probe.check(&[2]);
        second.launch().unwrap();
        probe.check(&[1, 3, 4]);
    }
    drop(eager);
}
