//! Compiles the CUDA kernels to PTX. Without the feature `cuda` it does nothing.

#[cfg(feature = "cuda")]
mod kernels {
    use std::error::Error;
    use std::path::PathBuf;

    /// Compiles each `kernels/*.cu` to PTX with the builder of candle's own kernels, and writes a
    /// constant with the text of each to `$OUT_DIR/ptx.rs`.
    pub(crate) fn build() -> Result<(), Box<dyn Error>> {
        println!("cargo::rerun-if-changed=build.rs");
        println!("cargo::rerun-if-changed=kernels");
        let out_dir = PathBuf::from(std::env::var("OUT_DIR")?);
        cudaforge::KernelBuilder::new()
            .source_dir("kernels")
            // A header that changes is no reason for the builder to compile anew by itself.
            .watch(["kernels"])
            .arg("-std=c++17")
            .arg("-O3")
            .arg("-lineinfo")
            .build_ptx()?
            .write(out_dir.join("ptx.rs"))?;
        Ok(())
    }
}

#[cfg(not(feature = "cuda"))]
mod kernels {
    use std::convert::Infallible;

    #[expect(clippy::unnecessary_wraps, reason = "the signature of the other build")]
    pub(crate) fn build() -> Result<(), Infallible> {
        println!("cargo::rerun-if-changed=build.rs");
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    kernels::build()?;
    Ok(())
}
