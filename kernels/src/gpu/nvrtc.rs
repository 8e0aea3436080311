//! From CUDA source to machine code. Needs NVRTC, no device.

use std::ffi::{CStr, CString, c_char};
use std::ptr::null_mut;

use cudarc::nvrtc::sys;

use super::error::nvrtc;
use super::{GpuError, Library, libraries};

/// Source of a module.
#[derive(Debug, Clone, Copy)]
pub struct Program<'a> {
    /// File name, for messages.
    pub name: &'a str,
    pub source: &'a str,
    /// What it may include: (name, text).
    pub headers: &'a [(&'a str, &'a str)],
    /// `NAME` or `NAME=VALUE`.
    pub defines: &'a [String],
    /// Appended to the device's architecture: "" or, for instructions of one chip alone, "a".
    pub arch_suffix: &'a str,
}

/// Machine code for one architecture.
#[derive(Debug)]
pub struct Cubin {
    pub image: Vec<u8>,
    /// Warnings, empty if there are none.
    pub log: String,
}

/// No fast math: the results of a kernel are what its source says.
const OPTIONS: [&CStr; 3] = [c"-std=c++17", c"--fmad=true", c"-default-device"];

/// NVRTC's (major, minor).
pub(super) fn version() -> Result<(i32, i32), GpuError> {
    libraries::require(Library::Nvrtc)?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: NVRTC is loaded; pointers are to locals.
    nvrtc("asking for the version", unsafe { sys::nvrtcVersion(&mut major, &mut minor) })?;
    Ok((major, minor))
}

/// Compile for `arch`, such as `sm_90`; `arch_suffix` is not looked at.
pub fn compile_cubin(arch: &str, program: &Program) -> Result<Cubin, GpuError> {
    libraries::require(Library::Nvrtc)?;
    let text = |what, text: &str| CString::new(text).map_err(|_| GpuError::Nul { program: program.name.into(), what });
    let (source, name) = (text("the source", program.source)?, text("the name", program.name)?);
    let mut options = vec![text("the architecture", &format!("--gpu-architecture={arch}"))?];
    for define in program.defines {
        options.push(text("a define", &format!("-D{define}"))?);
    }
    let options: Vec<*const c_char> =
        OPTIONS.into_iter().chain(options.iter().map(|o| &**o)).map(CStr::as_ptr).collect();
    let mut headers = Vec::new();
    for (name, contents) in program.headers {
        headers.push((text("a header's name", name)?, text("a header", contents)?));
    }
    let names: Vec<_> = headers.iter().map(|(name, _)| name.as_ptr()).collect();
    let contents: Vec<_> = headers.iter().map(|(_, contents)| contents.as_ptr()).collect();

    let mut handle = Handle(null_mut());
    // SAFETY: all texts end with a NUL and outlive the program; there are as many names as contents.
    unsafe {
        let created = sys::nvrtcCreateProgram(
            &mut handle.0,
            source.as_ptr(),
            name.as_ptr(),
            headers.len() as i32,
            contents.as_ptr(),
            names.as_ptr(),
        );
        nvrtc("making a program", created)?;
        let compiled = sys::nvrtcCompileProgram(handle.0, options.len() as i32, options.as_ptr());
        let log = handle.log()?;
        match compiled {
            sys::nvrtcResult::NVRTC_ERROR_COMPILATION => Err(GpuError::Compile { program: program.name.into(), log }),
            code => {
                nvrtc("compiling", code)?;
                Ok(Cubin { image: handle.image()?, log })
            }
        }
    }
}

struct Handle(sys::nvrtcProgram);

impl Handle {
    fn log(&self) -> Result<String, GpuError> {
        let mut size = 0;
        // SAFETY: the program was made; the buffer has the size that NVRTC asks for, its NUL included.
        unsafe {
            nvrtc("sizing the log", sys::nvrtcGetProgramLogSize(self.0, &mut size))?;
            let mut log = vec![0u8; size];
            nvrtc("reading the log", sys::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast()))?;
            Ok(String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned())
        }
    }

    fn image(&self) -> Result<Vec<u8>, GpuError> {
        let mut size = 0;
        // SAFETY: the program compiled; the buffer has the size that NVRTC asks for.
        unsafe {
            nvrtc("sizing the machine code", sys::nvrtcGetCUBINSize(self.0, &mut size))?;
            let mut image = vec![0u8; size];
            nvrtc("reading the machine code", sys::nvrtcGetCUBIN(self.0, image.as_mut_ptr().cast()))?;
            Ok(image)
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: made by `nvrtcCreateProgram`, destroyed once. A failure leaves nothing to do.
            let _ = unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::HEADERS;
    use super::*;

    /// `None`, with the reason printed, where there is no NVRTC.
    fn compile(arch: &str, source: &str, defines: &[String]) -> Option<Result<Cubin, GpuError>> {
        if let Err(missing) = libraries::require(Library::Nvrtc) {
            eprintln!("skipped: {missing}");
            return None;
        }
        let program = Program { name: "test.cu", source, headers: HEADERS, defines, arch_suffix: "" };
        Some(compile_cubin(arch, &program))
    }

    #[test]
    fn a_kernel_with_the_shared_header_compiles_without_a_warning() {
        let source = "#include \"common.cuh\"\n\
                      extern \"C\" __global__ void k(u16* y) { wait_for_previous(); y[threadIdx.x] = to_bf16(VALUE); }";
        for arch in ["sm_80", "sm_90", "sm_90a"] {
            let Some(cubin) = compile(arch, source, &["VALUE=1.5f".into()]) else { return };
            let cubin = cubin.unwrap();
            assert_eq!(&cubin.image[..4], b"\x7fELF", "{arch}");
            assert_eq!(cubin.log, "", "{arch}");
        }
    }

    #[test]
    fn an_error_names_the_program_and_the_line() {
        let Some(result) = compile("sm_80", "\n\n__global__ void k() { x = 1; }", &[]) else { return };
        let error = result.unwrap_err().to_string();
        assert!(error.contains("`test.cu`") && error.contains("test.cu(3)"), "{error}");
    }

    #[test]
    fn warnings_are_in_the_log() {
        let Some(result) = compile("sm_80", "extern \"C\" __global__ void k() { int unused; }", &[]) else { return };
        assert!(result.unwrap().log.contains("warning"));
    }

    #[test]
    fn every_source_compiles_without_a_warning() {
        for (name, source) in super::super::SOURCES {
            for arch in ["sm_80", "sm_90"] {
                let Some(cubin) = compile(arch, source, &[]) else { return };
                assert_eq!(cubin.unwrap().log, "", "{name} for {arch}");
            }
        }
    }
}
