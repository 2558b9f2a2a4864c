//! What this machine offers to packages: the platform and its virtual packages.
//!
//! Hides how a driver or a C library is asked; asking loads libraries of the driver, so it is done in this process
//! and not in the daemon. A variable `CONDA_OVERRIDE_...` takes precedence where it is set.
//!
//! Invariants: `__linux` is the full version of the kernel, because packages may ask for it; an identity computed
//! from this must leave it out, or every new kernel would mean new environments.

use agent_env::{FailureKind, Platform};
use rattler_conda_types::Subdir;
use rattler_virtual_packages::{VirtualPackageOverrides, VirtualPackages};

use super::{Done, failed};

/// The platform and its virtual packages, sorted.
pub(crate) fn probe() -> Done<Platform> {
    let subdir = Subdir::current().ok_or_else(|| {
        failed(FailureKind::Other, "no conda packages are made for machines of this architecture")
    })?;
    let found = VirtualPackages::detect(&VirtualPackageOverrides::from_env(), None).map_err(|error| {
        failed(FailureKind::Other, format!("cannot tell what this machine offers: {error}"))
    })?;
    let mut virtual_packages: Vec<String> =
        found.into_generic_virtual_packages().map(|package| package.to_string()).collect();
    virtual_packages.sort();
    Ok(Platform { subdir: subdir.to_string(), virtual_packages })
}
