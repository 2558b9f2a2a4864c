//! Images made on the machine, from what is installed there; nothing is pulled.
//!
//! Owns what is in them and where their archives are kept: beside what cargo builds, by name and the digest of the
//! recipe, so that each is made once. Bringing one into an engine costs a second or two, and nothing when it has it
//! already.
//!
//! | Image | Made of | Has |
//! |---|---|---|
//! | [`Image::Busybox`] | `busybox-static` | `sh` and the usual tools, no C library, no bash |
//! | [`Image::Scratch`] | one static program | `/bin/echo`, and nothing else: no shell |
//! | [`Image::Python`] | packages of the distribution, unpacked by `mmdebstrap` | bash, Python 3 and its whole library |
//! | [`Image::Mpi`] | more of them | the same, Open MPI and MPICH |
//! | [`Image::Torch`] | more of them | the same as Python's, and PyTorch for processors |

#![allow(clippy::disallowed_methods, reason = "runs what tests are made with")]

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use sha2::{Digest, Sha256};

use crate::docker::Docker;

/// The label with the digest of the recipe.
const RECIPE: &str = "agentd.test.recipe";

/// One of the images of the tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Image {
    /// A shell and tools.
    Busybox,
    /// A single program.
    Scratch,
    /// A Debian with Python.
    Python,
    /// The same with two MPIs.
    Mpi,
    /// The same with PyTorch.
    Torch,
}

/// What Python's image is made of. Unpacked, not configured: nothing of it needs that.
const PACKAGES: &str = "base-files,bash,coreutils,dash,libc-bin,python3,sed,grep";

/// What an image with MPI has besides.
const MPI_PACKAGES: &str = "openmpi-bin,mpich";

/// What an image with PyTorch has besides.
const TORCH_PACKAGES: &str = "python3-torch,python3-setuptools";

/// Configuring the packages would link these.
const LIBRARIES: &str = "ENV LD_LIBRARY_PATH=/usr/lib/x86_64-linux-gnu/blas:/usr/lib/x86_64-linux-gnu/lapack:/usr/lib/x86_64-linux-gnu/openblas-pthread";

/// MPICH's library has the name by which `mpi4py` looks for it, which is not the distribution's.
const MPI_FINISH: &str = r#"
cd "$1" && for library in usr/lib/*/libmpich.so.12; do ln -s libmpich.so.12 "${library%ch.so.12}.so.12"; done
"#;

/// What a package would do when it is configured, and what nobody reads.
const FINISH: &str = r#"
cd "$1" && rm -rf usr/share/doc usr/share/man usr/share/locale var/cache/apt/* var/lib/apt/lists/* \
    usr/lib/x86_64-linux-gnu/perl* usr/share/perl*
printf 'root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n' > etc/passwd
printf 'root:x:0:\nnogroup:x:65534:\n' > etc/group
chmod 1777 tmp
"#;

impl Image {
    /// Its name.
    pub fn tag(self) -> &'static str {
        match self {
            Image::Busybox => "agentd-test/busybox:1",
            Image::Scratch => "agentd-test/scratch:1",
            Image::Python => "agentd-test/python:1",
            Image::Mpi => "agentd-test/mpi:1",
            Image::Torch => "agentd-test/torch:1",
        }
    }

    /// Its variables and its usual command.
    fn changes(self) -> &'static [&'static str] {
        match self {
            Image::Busybox => &["ENV PATH=/bin", "ENV FROM_THE_IMAGE=yes", "CMD [\"sh\"]"],
            Image::Scratch => &["CMD [\"/bin/echo\", \"hello\"]"],
            Image::Python | Image::Mpi => {
                &["ENV PATH=/usr/bin:/bin", "ENV FROM_THE_IMAGE=yes", "CMD [\"python3\"]"]
            }
            Image::Torch => &["ENV PATH=/usr/bin:/bin", LIBRARIES],
        }
    }

    /// Brings it into an engine, unless it is there; the engine's name of its content.
    #[track_caller]
    pub fn on(self, docker: &Docker) -> String {
        let recipe = self.recipe();
        if docker.image(self.tag()).is_none() || docker.image_label(self.tag(), RECIPE) != recipe {
            let root = fs::read(self.archive()).expect("an archive");
            let label = format!("LABEL {RECIPE}={recipe}");
            let changes: Vec<&str> = self.changes().iter().copied().chain([label.as_str()]).collect();
            docker.import(self.tag(), root, &changes);
        }
        docker.image(self.tag()).expect("it was imported a moment ago")
    }

    /// The tar of its root directory, made on first use.
    #[track_caller]
    pub fn archive(self) -> PathBuf {
        let (name, recipe) = (format!("{self:?}").to_lowercase(), self.recipe());
        let (dir, archive) = (kept(), kept().join(format!("{name}-{recipe}.tar")));
        fs::create_dir_all(&dir).expect("a directory");
        let lock = File::create(dir.join(format!("{name}.lock"))).expect("a lock file");
        lock.lock().expect("a lock");
        if !archive.exists() {
            let half = dir.join(format!("{name}.half"));
            match self {
                Image::Busybox => fs::write(&half, tools(&applets())).expect("a file"),
                Image::Scratch => fs::write(&half, tools(&[])).expect("a file"),
                Image::Python => debian(&half, PACKAGES, &[FINISH]),
                Image::Mpi => debian(&half, &format!("{PACKAGES},{MPI_PACKAGES}"), &[FINISH, MPI_FINISH]),
                Image::Torch => debian(&half, &format!("{PACKAGES},{TORCH_PACKAGES}"), &[FINISH]),
            }
            fs::rename(&half, &archive).expect("the same directory");
        }
        archive
    }

    /// What it is made of, in a few characters.
    fn recipe(self) -> String {
        let mut hasher = Sha256::new();
        hasher.update(format!("{self:?} 2 {:?}", self.changes()));
        match self {
            Image::Busybox | Image::Scratch => hasher.update(fs::read(busybox()).expect("a program")),
            Image::Python => hasher.update(format!("{PACKAGES} {FINISH} {}", release())),
            Image::Mpi => {
                hasher.update(format!("{PACKAGES} {MPI_PACKAGES} {FINISH} {MPI_FINISH} {}", release()))
            }
            Image::Torch => hasher.update(format!("{PACKAGES} {TORCH_PACKAGES} {FINISH} {}", release())),
        }
        let digest = hasher.finalize();
        digest.iter().take(6).map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Where archives are kept.
fn kept() -> PathBuf {
    crate::profile_dir().with_file_name("images")
}

fn busybox() -> &'static Path {
    let found = ["/bin/busybox", "/usr/bin/busybox"].map(Path::new).into_iter().find(|path| path.exists());
    found.expect("the images of the tests need busybox: install busybox-static")
}

/// What busybox can do, itself left out.
fn applets() -> Vec<String> {
    let said = Command::new(busybox()).arg("--list").output().expect("busybox runs");
    let text = String::from_utf8_lossy(&said.stdout).into_owned();
    text.lines().filter(|name| *name != "busybox").map(str::to_owned).collect()
}

/// A root directory with busybox under these names; as `echo` alone when there are none.
fn tools(applets: &[String]) -> Vec<u8> {
    let program = fs::read(busybox()).expect("a program");
    let mut root = Root::new();
    root.dir("tmp", 0o1777);
    match applets {
        [] => root.file("bin/echo", 0o755, &program),
        _ => root.file("bin/busybox", 0o755, &program),
    }
    applets.iter().for_each(|name| root.link(&format!("bin/{name}"), "busybox"));
    root.finish()
}

/// These and what they need, from packages of the distribution of this machine.
fn debian(archive: &Path, packages: &str, hooks: &[&str]) {
    let mut make = Command::new("mmdebstrap");
    make.args(["--quiet", "--variant=extract", "--format=tar"]).arg(format!("--include={packages}"));
    // Packages that are only unpacked are never customized: that hook would not run.
    make.args(hooks.iter().map(|hook| format!("--extract-hook={}", hook.replace("\\\n", ""))));
    make.arg(release());
    let out = File::create(archive).expect("a file");
    let made = make.arg("-").stdin(Stdio::null()).stdout(out).status();
    let made = made.expect("this image needs mmdebstrap: install it");
    assert!(made.success(), "mmdebstrap cannot make the image; what it said is above");
}

/// The name of the distribution's release.
fn release() -> String {
    let text = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    line.unwrap_or("stable").trim_matches('"').to_owned()
}

/// A root directory, or a layer of one, in the making.
pub struct Root(tar::Builder<Vec<u8>>);

impl std::fmt::Debug for Root {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Root")
    }
}

impl Default for Root {
    fn default() -> Root {
        Root::new()
    }
}

impl Root {
    /// An empty one.
    pub fn new() -> Root {
        Root(tar::Builder::new(Vec::new()))
    }

    /// Adds a file.
    pub fn file(&mut self, path: &str, mode: u32, bytes: &[u8]) {
        let mut header = header(tar::EntryType::Regular, mode);
        header.set_size(bytes.len() as u64);
        self.0.append_data(&mut header, path, bytes).expect("memory is enough");
    }

    /// Adds a directory.
    pub fn dir(&mut self, path: &str, mode: u32) {
        let mut header = header(tar::EntryType::Directory, mode);
        self.0.append_data(&mut header, path, &[][..]).expect("memory is enough");
    }

    /// Adds a link.
    pub fn link(&mut self, path: &str, to: &str) {
        let mut header = header(tar::EntryType::Symlink, 0o777);
        self.0.append_link(&mut header, path, to).expect("memory is enough");
    }

    /// The bytes of the tar.
    pub fn finish(self) -> Vec<u8> {
        self.0.into_inner().expect("memory is enough")
    }
}

/// The same bytes each time: no owner but root, no time.
fn header(kind: tar::EntryType, mode: u32) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(0);
    header
}
